"""Worker processes that do tasks, and die with the process that started them."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

import torch

from lockstep.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], n_workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with function(item), in the order in which they are ready.

    With one worker this process does the work itself. Two items a worker are under way at a time, so memory
    does not grow with the number of items. When the caller stops early, items that are being worked on are
    waited for, so that nothing is left half-done. Raises UserError when a worker dies.
    """
    if n_workers == 1:
        torch.set_num_threads(1)
        for item in items:
            yield item, function(item)
        return
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(n_workers, context, _begin, (os.getpid(),))
    under_way: dict[Future[Result], Item] = {}
    try:
        for item in items:
            with _deaf_to_interrupts():  # for the workers that this may start
                future = executor.submit(function, item)
            under_way[future] = item
            if len(under_way) >= 2 * n_workers:
                yield from _next_ones(under_way)
        while under_way:
            yield from _next_ones(under_way)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps because memory ran out: the same command goes on "
            "where it was; --workers takes fewer"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _next_ones(under_way: dict[Future[Result], Item]) -> Iterator[tuple[Item, Result]]:
    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
        yield under_way.pop(future), future.result()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C is the parent's to answer: processes started in here never hear of it, the parent does later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """When the parent dies, the kernel kills its workers."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)  # the processes are the parallelism
