"""Runs a function in several processes that have pipes to each other, as trainers do: for tools and tests."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from lockstep.comm.pipes import Pipe
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.processes import LISTEN_SECONDS, Processes
from lockstep.launch.status import StatusBoard

DEADLINE = 60.0
RESULT_SECONDS = 600.0
LEAVE_SECONDS = 5.0  # from a result to a process's own end


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: what its function returned, or what went wrong."""

    value: Any = None
    problem: str = ""  # what the error says, or how the process ended; empty where all is well
    traceback: str = ""  # of the error; empty where the process ended, or hung, without one


def run_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any) -> list[Any]:
    """Calls function(rank, pipes, *arguments) in n_ranks processes; returns the results by rank.

    Raises EOFError where a process ended or hung, else AssertionError with the traceback of a rank's error.
    """
    # A server that has torch imported and never touches a device. It starts now, with signals as they are.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["lockstep.network.replica"])
    forkserver.ensure_running()
    outcomes = _run("forkserver", function, n_ranks, arguments, RESULT_SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome.problem and not outcome.traceback:
            raise EOFError(f"rank {rank} {outcome.problem}")
    for rank, outcome in enumerate(outcomes):
        assert not outcome.problem, f"rank {rank}:\n{outcome.traceback}"
    return [outcome.value for outcome in outcomes]


def try_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any, seconds: float) -> list[Outcome]:
    """Likewise, in processes as fresh as trainers are. Whatever happens to one is told, not raised.

    seconds: what takes longer is ended.
    """
    return _run("spawn", function, n_ranks, arguments, seconds)


def _run(
    method: str, function: Callable[..., Any], n_ranks: int, arguments: Any, seconds: float
) -> list[Outcome]:
    peers: list[dict[int, Connection]] = [{} for _ in range(n_ranks)]
    for rank in range(n_ranks):
        for other in range(rank):
            peers[rank][other], peers[other][rank] = multiprocessing.Pipe()
    with Processes(DEADLINE, method=method) as processes:
        for rank in range(n_ranks):
            call = (rank, peers[rank], dict(os.environ), function, arguments)
            processes.start(_name(rank), "lockstep.launch.ranks:run_rank", call)
            for end in peers[rank].values():
                end.close()
        return _collect(processes, n_ranks, seconds)


def _collect(processes: Processes, n_ranks: int, seconds: float) -> list[Outcome]:
    """Listens until every rank has given its outcome or is gone, or the time is over; sees them off."""
    outcomes: dict[int, Outcome] = {}
    until = time.monotonic() + seconds
    gone: set[int] = set()

    def take(told: tuple[int, Outcome]) -> None:
        outcomes[told[0]] = told[1]

    while len(outcomes.keys() | gone) < n_ranks and time.monotonic() < until:
        codes = processes.exit_codes()  # before listening: the last words of who is gone by now are heard
        processes.listen(take, LISTEN_SECONDS)
        gone = {rank for rank in range(n_ranks) if codes[_name(rank)] is not None}
    until = time.monotonic() + LEAVE_SECONDS
    while any(processes.exit_codes()[_name(rank)] is None for rank in outcomes) and time.monotonic() < until:
        processes.listen(take, LISTEN_SECONDS)
    codes = processes.exit_codes()
    return [outcomes.get(rank) or _without(codes[_name(rank)]) for rank in range(n_ranks)]


def _without(code: int | None) -> Outcome:
    """Of a rank that has told nothing."""
    if code is None:
        return Outcome(problem="gave no result in time")
    how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
    return Outcome(problem=f"{how} before it gave a result")


def run_rank(
    control: Pipe,
    board: StatusBoard,
    rank: int,
    peers: dict[int, Connection],
    environment: dict[str, str],
    function: Any,
    arguments: Any,
) -> None:
    """The process of one rank: tells the launcher what became of it, (rank, Outcome)."""
    os.environ.clear()  # what a fork server has is as old as that
    os.environ.update(environment)
    try:
        pipes = {other: Pipe(end, f"trainer {other}", DEADLINE) for other, end in peers.items()}
        board.say("its function")
        control.send((rank, Outcome(function(rank, pipes, *arguments))))
    except BaseException as error:
        told = isinstance(error, UserError | PeerProblem)
        words = str(error) if told else f"{type(error).__name__}: {error}"
        control.send((rank, Outcome(problem=words, traceback=traceback.format_exc())))


def _name(rank: int) -> str:
    return f"rank {rank}"
