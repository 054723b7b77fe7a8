"""Precautions for processes that multiprocessing spawns."""

import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


def start_resource_tracker() -> None:
    """Start multiprocessing's helper process so that SIGHUP does not end it; it ignores other signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # inherited by the helper
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main_file() -> Iterator[None]:
    """Keep processes that are started inside the block from importing the file of `__main__`.

    multiprocessing imports that file into each spawned process, so a script without an
    `if __name__ == "__main__":` guard would run once more in each. A child needs nothing of it, since its
    function is named as 'module:function'. Objects of `__main__` cannot be arguments.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
