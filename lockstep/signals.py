"""Handling of Ctrl-C, SIGTERM and SIGHUP in a launcher, from its first import to its last line.

A signal within a training step is recorded here. `Processes.watch` (launch/processes.py) then sends the
trainers `Stop`. They agree on it at the step's barrier (`Coordinator.outcome`, trainer/coordinator.py),
finish the step and save (`Trainer.run`, train_funcs.py), and the launcher exits with 130 or 143. A second
signal, or one before the first step, ends all at once. A child that gets SIGTERM passes it on to the
launcher (launch/child_main.py).

This module imports very little, so a program can install the handlers before its other imports.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STATUS_SIGNAL = signal.SIGUSR1  # from outside: say what every process is doing
STOP_SIGNAL = signal.SIGUSR2  # from a child that received SIGTERM to the launcher: stop the run
_STOP_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # from outside
_FROM_OUTSIDE = (*_STOP_REQUESTS, STATUS_SIGNAL)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None)  # opened now, since nothing may be loaded between fork and exec


class Interrupts:
    """A launcher's reaction to Ctrl-C, SIGTERM and SIGHUP.

    While no processes run there is nothing to save, and a signal ends the program at once. After `note`,
    signals are recorded: the first asks for an orderly stop; another one, at least a second later, for an
    immediate end. The second's delay is needed because `timeout` and cluster managers send the same signal to
    a process and to its group.

    A closed terminal or a lost connection sends SIGHUP, which counts as a first SIGTERM. It is ignored if
    this process inherited it as ignored (nohup).

    Attributes:
        code: The exit code of a stopped run; 0 while no stop has been requested.
        at_once: Whether the run is to end without saving.
        is_asked_for_status: Whether SIGUSR1 has arrived.
        since: When the first signal came (monotonic clock).
        farewell: Called before this class ends the program; reports to launchers of other hosts.
    """

    def __init__(self) -> None:
        self.code = 0
        self.at_once = self.is_asked_for_status = False
        self.farewell: Callable[[], None] | None = None
        self._last_line: str | None = None  # to end the program with; None while signals are only recorded
        self.since = 0.0

    def install(self, last_line: str) -> None:
        """Install the signal handlers. A signal now ends the program with the message `last_line`."""
        signal.signal(STATUS_SIGNAL, self._note_status)
        # Inherited as ignored, it would take away the exit codes of children.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (*_STOP_REQUESTS, STOP_SIGNAL):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note_stop)
        self.leave(last_line)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # lockstep.train blocks it until now

    def note(self) -> None:
        """Record signals from now on, because child processes must be stopped before the launcher exits."""
        self._last_line = None

    def leave(self, last_line: str) -> None:
        """End the program with `last_line` at the next signal, or at once if one was recorded."""
        self._last_line = last_line
        self._leave_if_requested()

    def _leave_if_requested(self) -> None:
        if self.code and self._last_line is not None:
            # No exception: libraries swallow some, and Python would wait for threads that read files.
            # The files that a launcher writes are complete at any moment.
            if self.farewell is not None:
                self.farewell()
            with suppress(OSError):  # the terminal may be closed
                line = f"\nlockstep: {self._last_line}\n"
                os.write(2, line.encode("utf-8", "backslashreplace"))  # a path in it may be any bytes
            os._exit(self.code)

    def _note_status(self, number: int, frame: object) -> None:
        self.is_asked_for_status = True

    def _note_stop(self, number: int, frame: object) -> None:
        if not self.code:
            self.since = time.monotonic()  # before `code`: another signal may interrupt this
            self.code = 128 + (number if number == signal.SIGINT else signal.SIGTERM)
        elif number in (signal.SIGINT, signal.SIGTERM) and time.monotonic() - self.since > 1:
            self.at_once = True
        self._leave_if_requested()


def ignore_signals() -> None:
    """Ignore, as a launcher exits, what `Interrupts` handles.

    Python restores the default actions of handled signals in its exit, and they would kill the process.
    """
    for number in (*_FROM_OUTSIDE, STOP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start processes inside the block with the signals from outside blocked, until they handle them.

    The launcher does not ignore them meanwhile: the kernel would discard a signal that another thread
    receives, or that is pending.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)  # inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_launcher(on_sigterm: Callable[[int, object], None] | signal.Handlers) -> None:
    """Ignore Ctrl-C, SIGHUP and SIGUSR1, and unblock them, in a process that the launcher has started.

    They may be sent to a whole group of processes, and the launcher handles them.

    Args:
        on_sigterm: The handler of SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGHUP, STATUS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_OUTSIDE)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent exits (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set the name that top and ps show for this process, cut to 15 bytes (prctl(2))."""
    _libc.prctl(_PR_SET_NAME, name.encode())
