"""The child's side of a run: how a trainer or loader process starts, reports, and dies with the launcher.

A child outlives the launcher by moments only. The kernel kills it (prctl(2), PR_SET_PDEATHSIG), except
trainer 0, which sees the end of the *lifeline*, a pipe whose other end only the launcher holds, and says a
last word for all.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep.comm.messages import Failed, Finished, Ready
from lockstep.comm.pipes import Pipe
from lockstep.errors import Garbled, PeerLost, PeerProblem, UserError
from lockstep.interrupts import die_with_parent
from lockstep.launch.status import TRACE, StatusBoard

_last_word = threading.Lock()
_DYING_SECONDS = 0.5  # between a dying launcher's children and its pipes, at most


@dataclass(frozen=True)
class ChildStart:
    """What a child is started with. `entry` is 'module:function', imported in the child."""

    name: str
    entry: str
    arguments: tuple[Any, ...]
    control: Connection
    lifeline: Connection
    launcher: int
    is_own_child: bool  # the launcher's, not a fork server's
    deadline: float
    stop_signal: signal.Signals | None  # what the launcher wants to hear when this process is asked to end
    speaker: bool  # says the last word when the launcher dies


def child_main(start: ChildStart) -> None:
    """The main function of every child: runs `entry(control, board, *arguments)` and reports how it ended.

    SIGTERM is passed on to a launcher that takes it as a wish to stop, so that a signal to the whole group of
    processes stops a run in good order. Ctrl-C is ignored from birth; the launcher has it too.
    """
    wish = start.stop_signal
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL if wish is None else lambda *_: os.kill(start.launcher, wish)
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # it was held back while this process began
    control = Pipe(start.control, "the launcher", start.deadline)
    board = StatusBoard.create()
    _tie_to_launcher(start, board)
    try:
        if TRACE in os.environ:
            board.trace(Path(os.environ[TRACE], f"{start.name}.{os.getpid()}.txt"))
        board.say("starting")
        control.send(Ready(os.getpid()))
        board.send(control)
        module, function = start.entry.split(":")
        stopped = getattr(importlib.import_module(module), function)(control, board, *start.arguments)
        board.say("leaving")
        control.send(Finished(bool(stopped)))
    except BaseException as error:  # SystemExit in a user's model too
        _fail(error, control, start, board)
    sys.exit(0)


def _fail(error: BaseException, control: Pipe, start: ChildStart, board: StatusBoard) -> None:
    """Reports the error and leaves at once: to free a GPU's memory is to wait for all that it was asked, and
    that may be waiting for ever for an event of a process that has died."""
    try:
        control.send(_failure(error))
        # A dying launcher's children die before its pipes close: a lost peer may be but its death.
        if start.speaker and isinstance(error, PeerProblem) and start.lifeline.poll(_DYING_SECONDS):
            _launcher_died(start, board)
    except PeerLost:  # the launcher has died: that is the news, not this
        _launcher_died(start, board)
    with suppress(OSError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _failure(error: BaseException) -> Failed:
    text = " ".join(str(error).split())  # one line
    if isinstance(error, UserError):
        return Failed("user", text)
    if isinstance(error, MemoryError):
        return Failed("user", f"out of memory: {text}; lower batch_size or n_slots")
    if isinstance(error, Garbled):  # nobody is lost
        return Failed("crash", text)
    if isinstance(error, PeerProblem):
        return Failed("lost", text, peer=error.peer)
    return Failed("crash", f"{type(error).__name__}: {text}", traceback.format_exc())


def _tie_to_launcher(start: ChildStart, board: StatusBoard) -> None:
    if start.speaker:

        def watch() -> None:
            start.lifeline.poll(None)  # for as long as the launcher lives
            _launcher_died(start, board)

        threading.Thread(target=watch, daemon=True).start()
    # The speaker may have been suspended: it must wake up to speak and leave.
    die_with_parent(signal.SIGCONT if start.speaker else signal.SIGKILL)
    if start.is_own_child and os.getppid() != start.launcher:  # it died before the line above
        _launcher_died(start, board)


def _launcher_died(start: ChildStart, board: StatusBoard) -> None:
    if start.speaker:
        text = (
            f"\nlockstep: the launcher (pid {start.launcher}) died, probably killed, "
            f"while {start.name} was at: "
            f"{board.read()}. The run has ended; resume_train=True goes on from its last checkpoint.\n"
        )
        _last_word.acquire()  # never released: the thread that comes second must not speak, nor leave first
        with suppress(OSError):  # the terminal may have died, too
            os.write(2, text.encode())  # one call: it can't be mixed with another process's output
    os._exit(1)
