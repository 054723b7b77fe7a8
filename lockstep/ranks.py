"""Runs a function in several processes that have pipes to each other, as trainers do: for tools and tests."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.errors import PeerProblem, UserError
from lockstep.pipes import Pipe

DEADLINE = 60.0
RESULT_SECONDS = 600.0


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
    context = multiprocessing.get_context("forkserver")  # it imports torch once, and never touches a device
    context.set_forkserver_preload(["lockstep.replica"])
    call = (dict(os.environ), function, *arguments)
    outcomes = _run(context, _in_environment, n_ranks, call, RESULT_SECONDS)
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
    return _run(multiprocessing.get_context("spawn"), function, n_ranks, arguments, seconds)


def _run(
    context: SpawnContext | ForkServerContext,
    function: Callable[..., Any],
    n_ranks: int,
    arguments: Any,
    seconds: float,
) -> list[Outcome]:
    peers: list[dict[int, Connection]] = [{} for _ in range(n_ranks)]
    for rank in range(n_ranks):
        for other in range(rank):
            peers[rank][other], peers[other][rank] = context.Pipe()
    processes, results = [], []
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, function, rank, peers[rank], arguments))
        process.start()
        theirs.close()
        for end in peers[rank].values():
            end.close()
        processes.append(process)
        results.append(ours)
    until = time.monotonic() + seconds
    try:
        return [_take(*pair, until) for pair in zip(processes, results, strict=True)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _in_environment(
    rank: int, pipes: dict[int, Pipe], environment: dict[str, str], function: Any, *arguments: Any
) -> Any:
    os.environ.clear()  # what the fork server has is as old as that
    os.environ.update(environment)
    return function(rank, pipes, *arguments)


def _main(result: Connection, function: Any, rank: int, peers: dict[int, Connection], arguments: Any) -> None:
    try:
        pipes = {other: Pipe(end, f"trainer {other}", DEADLINE) for other, end in peers.items()}
        result.send(Outcome(function(rank, pipes, *arguments)))
    except BaseException as error:
        told = isinstance(error, UserError | PeerProblem)
        words = str(error) if told else f"{type(error).__name__}: {error}"
        result.send(Outcome(problem=words, traceback=traceback.format_exc()))


def _take(process: BaseProcess, result: Connection, until: float) -> Outcome:
    if not result.poll(max(0.0, until - time.monotonic())):
        return Outcome(problem="gave no result in time")
    try:
        outcome = result.recv()
    except (EOFError, ConnectionResetError):
        process.join(5)
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
        return Outcome(problem=f"{how} before it gave a result")
    assert isinstance(outcome, Outcome)
    return outcome
