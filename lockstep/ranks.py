"""Runs a function in several processes that have pipes to each other, as trainers do: for tools and tests."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lockstep.pipes import Pipe

DEADLINE = 60.0
RESULT_SECONDS = 600.0


def run_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any) -> list[Any]:
    """Calls function(rank, pipes, *arguments) in n_ranks processes; returns the results by rank."""
    context = multiprocessing.get_context("forkserver")  # it imports torch once, and never touches a device
    context.set_forkserver_preload(["lockstep.replica"])
    peers: list[dict[int, Connection]] = [{} for _ in range(n_ranks)]
    for rank in range(n_ranks):
        for other in range(rank):
            peers[rank][other], peers[other][rank] = context.Pipe()
    processes, results = [], []
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        call = (function, rank, peers[rank], arguments)
        process = context.Process(target=_main, args=(theirs, dict(os.environ), *call))
        process.start()
        theirs.close()
        for end in peers[rank].values():
            end.close()
        processes.append(process)
        results.append(ours)
    try:
        return [_take(rank, result) for rank, result in enumerate(results)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _main(
    result: Connection,
    environment: dict[str, str],
    function: Any,
    rank: int,
    peers: dict[int, Connection],
    arguments: Any,
) -> None:
    os.environ.clear()  # what the fork server has is as old as that
    os.environ.update(environment)
    try:
        pipes = {other: Pipe(end, f"trainer {other}", DEADLINE) for other, end in peers.items()}
        result.send((True, function(rank, pipes, *arguments)))
    except BaseException:
        result.send((False, traceback.format_exc()))


def _take(rank: int, result: Connection) -> Any:
    assert result.poll(RESULT_SECONDS), f"rank {rank} gave no result"
    succeeded, value = result.recv()
    assert succeeded, f"rank {rank}:\n{value}"
    return value
