"""The child's side of a run: how a trainer or loader process starts, reports, and exits with the launcher.

A child outlives the launcher by moments only. The kernel kills it (prctl(2), PR_SET_PDEATHSIG). The exception
is trainer 0, the reporting child: it sees the end of the *liveness pipe*, whose other end only the launcher
holds, prints that the launcher died, and exits.
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
from lockstep.errors import BATCH_KEYS, DeviceFault, Garbled, PeerLost, PeerProblem, UndecidedFault, UserError
from lockstep.launch.status import TRACE, StatusBoard
from lockstep.signals import die_with_parent, leave_signals_to_launcher

NAME = "LOCKSTEP_CHILD"  # environment variable: the name of this process
_report_lock = threading.Lock()
_DYING_SECONDS = 0.5  # at most, between the deaths of a dying launcher's children and the end of its pipes


@dataclass(frozen=True)
class ChildStart:
    """The parameters of a new child. It imports `entry`, 'module:function'."""

    name: str
    entry: str
    arguments: tuple[Any, ...]
    control: Connection
    liveness: Connection
    launcher: int
    is_own_child: bool  # a child of the launcher, not of a fork server
    timeout: float
    stop_signal: signal.Signals | None  # sent to the launcher when this process receives SIGTERM
    reporting: bool  # prints the last message when the launcher dies


def child_main(start: ChildStart) -> None:
    """Run `entry(control, board, *arguments)` and report how it ended. Every child's main function.

    SIGTERM is passed on to a launcher with signal handling as a request to stop, so a signal to the whole
    process group stops a run in good order. Ctrl-C, SIGHUP and SIGUSR1 are ignored, because the launcher gets
    them too.
    """
    stop_signal = start.stop_signal
    leave_signals_to_launcher(
        signal.SIG_DFL if stop_signal is None else lambda *_: os.kill(start.launcher, stop_signal)
    )
    os.environ[NAME] = start.name
    control = Pipe(start.control, "the launcher", start.timeout)
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
    """Report the error and exit at once.

    An orderly exit frees a GPU's memory, which waits for its pending work, and that may wait for ever for an
    event of a process that has died.
    """
    try:
        control.send(_failure(error))
        # A dying launcher's children die before its pipes close: a lost peer may only be a sign of its death.
        if start.reporting and isinstance(error, PeerProblem) and start.liveness.poll(_DYING_SECONDS):
            _launcher_died(start, board)
    except PeerLost:  # the launcher has died, which is the cause of this error
        _launcher_died(start, board)
    with suppress(OSError):  # their reader may have exited
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _failure(error: BaseException) -> Failed:
    text = " ".join(str(error).split())  # one line
    if isinstance(error, UserError):
        return Failed("user", text)
    if isinstance(error, MemoryError):
        return Failed("user", f"out of memory: {text}; lower {BATCH_KEYS}")
    if text == "can't start new thread":  # Python's words in a RuntimeError
        return Failed("user", f"{text}: the limit of processes is reached (see ulimit -u)")
    if isinstance(error, DeviceFault):
        return Failed("faulty", text)
    if isinstance(error, Garbled | UndecidedFault):  # no process is lost
        return Failed("crash", text)
    if isinstance(error, PeerProblem):
        return Failed("lost", text, peer=error.peer)
    return Failed("crash", f"{type(error).__name__}: {text}", traceback.format_exc())


def _tie_to_launcher(start: ChildStart, board: StatusBoard) -> None:
    if start.reporting:

        def watch() -> None:
            start.liveness.poll(None)  # returns when the launcher dies
            _launcher_died(start, board)

        threading.Thread(target=watch, daemon=True).start()
    # The reporting child may be suspended, and must wake up to report and exit.
    die_with_parent(signal.SIGCONT if start.reporting else signal.SIGKILL)
    if start.is_own_child and os.getppid() != start.launcher:  # the launcher died before the line above
        _launcher_died(start, board)


def _launcher_died(start: ChildStart, board: StatusBoard) -> None:
    if start.reporting:
        text = (
            f"\nlockstep: the launcher (pid {start.launcher}) died, probably killed, "
            f"while {start.name} was at: "
            f"{board.read()}. The run has ended; resume_train=True resumes it from its last checkpoint.\n"
        )
        _report_lock.acquire()  # never released: a second thread must neither report nor exit first
        with suppress(OSError):  # the terminal may be closed, too
            os.write(2, text.encode())  # one call, so that it can't mix with another process's output
    os._exit(1)
