"""Ctrl-C and SIGTERM in a launcher, from its first import to its last line.

It imports next to nothing, so that a program can install it before its other imports.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNAL = signal.SIGUSR1  # child to launcher: I was asked to end; let us all stop in good order
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # opened now: between fork and exec nothing may be loaded


class Interrupts:
    """What a launcher does with Ctrl-C and SIGTERM.

    Before its processes and after them there is nothing to save: it leaves in the middle of whatever it does.
    From `note` on it notes the signal. Once: stop in good order. Again, a second later: at once. A second
    later, because `timeout` and cluster managers send the same signal to a process and to its group.
    """

    def __init__(self) -> None:
        self.code = 0  # the exit code of a stopped run; 0 while nobody has asked to stop
        self.at_once = False
        self.farewell: Callable[[], None] | None = None  # before leaving: tells launchers of other hosts
        self._last_words: str | None = None
        self._first = 0.0

    def install(self, last_words: str) -> None:
        """From now on signals are this object's, and end the program with `last_words`."""
        for number in (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL):
            signal.signal(number, self._take)
        self.leave(last_words)

    def note(self) -> None:
        """From now on signals are noted: processes run, and want to be told before the launcher leaves."""
        self._last_words = None

    def leave(self, last_words: str) -> None:
        """From now on a signal, or one that was noted before, ends the program at once with `last_words`."""
        self._last_words = last_words
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self.code and self._last_words is not None:
            # Not by an exception: libraries swallow some, and threads that read files would be waited for.
            # What a launcher writes is whole at any moment.
            if self.farewell is not None:
                self.farewell()
            os.write(2, f"\nlockstep: {self._last_words}\n".encode())
            os._exit(self.code)

    def _take(self, number: int, frame: object) -> None:
        if not self.code:
            self._first = time.monotonic()  # first: another signal may interrupt this handler anywhere
            self.code = 128 + (signal.SIGTERM if number == STOP_SIGNAL else number)
        elif number != STOP_SIGNAL and time.monotonic() - self._first > 1:
            self.at_once = True
        self._leave_if_asked()

    @contextmanager
    def ignored_by_children(self) -> Iterator[None]:
        """Processes started inside ignore the signals from birth; one that comes meanwhile is kept."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when the one that started it ends (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
