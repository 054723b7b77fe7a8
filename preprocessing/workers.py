"""Worker processes that run tasks, and end with the process that started them."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

import torch

from lockstep.errors import UserError
from lockstep.signals import die_with_parent

# If this process is killed, multiprocessing's tracker removes its semaphores, and warns of them afterwards.
_NO_WARNING = "ignore:resource_tracker"
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], n_workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with function(item), in the order of completion.

    With one worker this process does the work. At most two items per worker are in progress, so memory does
    not grow with the number of items. If the caller stops early, items in progress are finished first.

    Raises:
        UserError: A worker was killed.
    """
    if n_workers == 1:
        torch.set_num_threads(1)
        for item in items:
            yield item, function(item)
        return
    if _NO_WARNING not in sys.warnoptions:  # which the process that it starts inherits
        sys.warnoptions.append(_NO_WARNING)
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(n_workers, context, _begin, (os.getpid(),))
    under_way: dict[Future[Result], Item] = {}
    try:
        for item in items:
            with _interrupts_blocked():  # workers that start now inherit it
                future = executor.submit(function, item)
            under_way[future] = item
            if len(under_way) >= 2 * n_workers:
                yield from _next_ones(under_way)
        while under_way:
            yield from _next_ones(under_way)
    except BrokenProcessPool as error:
        for worker in multiprocessing.active_children():
            worker.kill()  # the executor waits for them after SIGTERM, which they ignore if this process does
        raise UserError(
            "a worker process was killed, perhaps because memory ran out: the same command "
            "resumes; --workers starts fewer"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _next_ones(under_way: dict[Future[Result], Item]) -> Iterator[tuple[Item, Result]]:
    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
        yield under_way.pop(future), future.result()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C: child processes never get it, and this process gets it after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """Ask the kernel to kill this worker when its parent ends."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)  # the processes already use all cores
