"""A thread that never keeps the program from exiting, and what threads need before they compute."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

MOST_THREADS = 1024  # of a process; more of them leave none to other programs of the machine

T = TypeVar("T")


class DaemonExecutor:
    """A single daemon thread that runs functions in the order of their submission.

    Python waits at exit for the threads of concurrent.futures, so a function that never returns would keep
    the program from exiting. It does not wait for this one. A forked child has no copy of the thread.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Return the future of the function's result."""
        future: Future[T] = Future()
        self._jobs.put((function, future))
        return future

    def _run(self) -> None:
        while True:
            _complete(*self._jobs.get())


def _complete(function: Callable[[], Any], future: "Future[Any]") -> None:
    """Run the function; its frame, and so its objects, do not outlive the call."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # SystemExit, too, belongs to the caller and must not end the thread
        future.set_exception(error)
    else:
        future.set_result(result)


def prepare_square_roots() -> None:
    """Compute the first square roots of this process, in this thread only.

    MKL prepares them in the first call. A thread whose first call comes at that moment now and then gets
    other bits: that of a second device, or that of a large tensor's second half, as in Adam's first update.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        torch.ones(1, dtype=dtype, device="cpu").sqrt()
