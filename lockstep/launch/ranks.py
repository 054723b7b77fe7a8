"""Running a function in several connected processes, as trainers are connected: for tools and tests."""

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
from lockstep.launch.processes import LISTEN_SECONDS, Processes, connect_all
from lockstep.launch.status import StatusBoard

DEADLINE = 60.0
RESULT_SECONDS = 600.0
LEAVE_SECONDS = 5.0  # from a result to the exit of its process


@dataclass(frozen=True)
class Outcome:
    """The result of one rank: what its function returned, or what went wrong."""

    value: Any = None
    problem: str = ""  # the error's message, or how the process ended; empty on success
    traceback: str = ""  # of the error; empty if the process ended or hung without one


def run_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any) -> list[Any]:
    """Call function(rank, pipes, *arguments) in n_ranks processes and return the results by rank.

    Args:
        function: `pipes` is a dict with a Pipe to each other rank.

    Raises:
        EOFError: A process ended or hung without a result.
        AssertionError: A function raised an error; with its traceback.
    """
    outcomes = _run(function, n_ranks, arguments, RESULT_SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome.problem and not outcome.traceback:
            raise EOFError(f"rank {rank} {outcome.problem}")
    for rank, outcome in enumerate(outcomes):
        assert not outcome.problem, f"rank {rank}:\n{outcome.traceback}"
    return [outcome.value for outcome in outcomes]


def try_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any, seconds: float) -> list[Outcome]:
    """Call a function like `run_ranks`, and return errors as outcomes.

    Args:
        seconds: Time after which processes are killed.
    """
    return _run(function, n_ranks, arguments, seconds)


def _run(function: Callable[..., Any], n_ranks: int, arguments: Any, seconds: float) -> list[Outcome]:
    # A fork server that has imported torch and never uses a device: an import takes a second or two, a fork
    # milliseconds. It starts now, with the signals as they are.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["lockstep.launch.preload"])
    forkserver.ensure_running()
    peers = connect_all(n_ranks)
    # The function may be in the main file.
    with Processes(DEADLINE, method="forkserver", has_main=True) as processes:
        for rank in range(n_ranks):
            call = (rank, peers[rank], dict(os.environ), function, arguments)
            processes.start(_name(rank), "lockstep.launch.ranks:run_rank", call)
        return _collect(processes, n_ranks, seconds)


def _collect(processes: Processes, n_ranks: int, seconds: float) -> list[Outcome]:
    """Listen until each rank has sent its outcome or exited, or time is up; then wait for exits."""
    outcomes: dict[int, Outcome] = {}
    until = time.monotonic() + seconds
    exited: set[int] = set()

    def take(message: tuple[int, Outcome]) -> None:
        rank, outcome = message
        outcomes[rank] = outcome

    while len(outcomes.keys() | exited) < n_ranks and time.monotonic() < until:
        # Before listening, so that the last messages of exited ranks are received.
        codes = processes.exit_codes()
        processes.listen(take, LISTEN_SECONDS)
        exited = {rank for rank in range(n_ranks) if codes[_name(rank)] is not None}
    until = time.monotonic() + LEAVE_SECONDS
    while any(processes.exit_codes()[_name(rank)] is None for rank in outcomes) and time.monotonic() < until:
        processes.listen(take, LISTEN_SECONDS)
    codes = processes.exit_codes()
    return [outcomes.get(rank) or _missing_outcome(codes[_name(rank)]) for rank in range(n_ranks)]


def _missing_outcome(code: int | None) -> Outcome:
    """Return the outcome of a rank that sent none."""
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
    """Run the function of one rank and send the launcher (rank, Outcome)."""
    os.environ.clear()  # a fork server's environment is that of its start
    os.environ.update(environment)
    try:
        pipes = {peer: Pipe(end, f"trainer {peer}", DEADLINE) for peer, end in peers.items()}
        board.say("its function")
        control.send((rank, Outcome(function(rank, pipes, *arguments))))
    except BaseException as error:
        is_expected = isinstance(error, UserError | PeerProblem)
        problem = str(error) if is_expected else f"{type(error).__name__}: {error}"
        control.send((rank, Outcome(problem=problem, traceback=traceback.format_exc())))


def _name(rank: int) -> str:
    return f"rank {rank}"
