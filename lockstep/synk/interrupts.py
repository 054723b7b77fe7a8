"""Interruptions of a command: lost ranks, and signals, whose handlers are deferred to its end."""

import os
import signal
import sys
import threading
import time
import weakref
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal takes 20 times as long
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class RankLost(RuntimeError):
    """A worker died or did not answer in time. The team cannot be used any more: close(), then fork() again.

    Attributes:
        rank, pid: Rank and process id of the lost worker.
        signal: Number of the signal that ended it, or None.
        doing: Last line of its status board.
    """

    def __init__(self, rank: int, pid: int, how: str, signal_number: int | None, doing: str) -> None:
        super().__init__(rank, pid, how, signal_number, doing)
        self.rank, self.pid, self.signal, self.doing = rank, pid, signal_number, doing
        self.how = how

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) {self.how} at: {self.doing}; close(), then fork() again"


class _Deferral:
    """The signals that arrive while the main thread performs a call.

    A handler may raise between any two lines, which would leave half a message in a pipe, or a variable
    without its value. Therefore `note` replaces all handlers that are Python functions during a call, and the
    handlers run at its end. A second Ctrl-C raises earlier, but only where `interruptible` computes.
    """

    def __init__(self) -> None:
        self.depth = 0  # of calls within calls
        self.on_second_interrupt: Callable[[], None] | None = None
        self.insisted = False  # a second Ctrl-C arrived, and has not raised yet
        self.may_raise = False  # in `interruptible`
        self.handlers: dict[int, Any] = {}  # the program's own; never cleared, in case `restore` is cut short
        self.arrived: list[tuple[int, FrameType | None]] = []

    def replace(self) -> None:
        for number in _SIGNALS:
            handler = getsignal(number)
            if callable(handler) and handler is not _note:
                self.handlers[number] = handler
                signal.signal(number, _note)

    def end(self) -> None:
        """Restore the handlers. Signals are noted until then: a handler that raises would prevent it."""
        try:
            self.restore()
        finally:
            self.depth, self.on_second_interrupt = 0, None  # which would keep a closed team in memory

    def restore(self) -> None:
        try:
            for number, handler in self.handlers.items():
                if getsignal(number) is _note:  # the call may have set a handler itself
                    signal.signal(number, handler)
        except BaseException:  # a handler that was already restored raised: restore the others, too
            self.restore()
            raise

    def note(self, number: int, frame: FrameType | None) -> None:
        if not self.depth:
            self.handlers[number](number, frame)
        elif number not in [earlier for earlier, _ in self.arrived]:
            self.arrived.append((number, frame))
        elif number == signal.SIGINT and self.on_second_interrupt is not None:
            self.insisted = True
            self.on_second_interrupt()
            if self.may_raise:
                self.may_raise = False  # a third Ctrl-C would cut short what follows the computation
                raise KeyboardInterrupt

    def deliver(self) -> None:
        """Call the handlers of all signals that arrived, even if one of them raises."""
        while self.arrived:
            number, frame = self.arrived.pop(0)
            try:
                if number == signal.SIGINT and self.insisted:
                    self.insisted = False
                    raise KeyboardInterrupt  # also where the program's own handler would not
                self.handlers[number](number, frame)
            finally:
                self.deliver()

    def forget_interrupt(self) -> None:
        """Forget the Ctrl-C that has raised already."""
        if self.insisted:
            self.arrived = [pair for pair in self.arrived if pair[0] != signal.SIGINT]
            self.insisted = False

    def send_again(self) -> None:
        """Send the signals again after a finalizer, in which Python ignores exceptions of handlers."""
        while self.arrived:
            number, _ = self.arrived.pop(0)
            threading.Thread(target=_send_after_finalizer, args=(number,)).start()

    def forget(self) -> None:
        """Reset a forked child: the call belongs to the parent."""
        self.depth, self.arrived, self.insisted, self.may_raise = 0, [], False, False
        self.restore()


def _send_after_finalizer(number: int) -> None:
    """Send a signal to the main thread when it has left its finalizer, which takes long on a busy machine."""
    main = threading.main_thread().ident
    assert main is not None
    while any(frame.f_code is weakref.finalize.__call__.__code__ for frame in _frames(main)):
        time.sleep(0.001)
    signal.pthread_kill(main, number)


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


_deferral = _Deferral()
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _note(number: int, frame: FrameType | None) -> None:
    _deferral.note(number, frame)


os.register_at_fork(after_in_child=_deferral.forget)


def defer_signals(
    on_second_interrupt: Callable[[], None] | None = None, in_finalizer: bool = False
) -> AbstractContextManager[None]:
    """Defer the handlers of signals to the end of the `with` block.

    Threads other than the main one need nothing, since Python calls handlers in the main thread only.

    Args:
        on_second_interrupt: Called at a second Ctrl-C, to end what the block waits for. KeyboardInterrupt is
            raised in `interruptible`, else at the end.
        in_finalizer: Send the signals again afterwards instead of calling the handlers.
    """
    if threading.current_thread() is not threading.main_thread() or _deferral.depth:
        return nullcontext()
    return _defer(on_second_interrupt, in_finalizer)


def interruptible(compute: Callable[[], T]) -> T:
    """Call a function that a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        return compute()
    try:
        _deferral.may_raise = True
        return compute()
    finally:
        _deferral.may_raise = False


def raise_second_interrupt() -> None:
    """Raise KeyboardInterrupt in the main thread if a second Ctrl-C arrived."""
    if _deferral.insisted and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def _defer(on_second_interrupt: Callable[[], None] | None, in_finalizer: bool) -> Iterator[None]:
    try:
        _deferral.depth, _deferral.insisted = 1, False
        _deferral.on_second_interrupt = on_second_interrupt
        _deferral.replace()
        yield
    except KeyboardInterrupt:
        _deferral.forget_interrupt()
        raise
    finally:
        try:
            _deferral.end()
        finally:
            if in_finalizer:
                _deferral.send_again()
            else:
                _deferral.deliver()
