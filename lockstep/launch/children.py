"""The launcher's view of a child process, and how a run ended."""

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep.comm.messages import Failed, Finished
from lockstep.comm.pipes import Pipe
from lockstep.launch.status import StatusBoard
from lockstep.launch.template import ForkedProcess
from lockstep.signals import Interrupts

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by someone, or by the kernel for lack of memory: see dmesg)",
    signal.SIGBUS: " (shared memory or a file went away under it: see df and dmesg)",
}


@dataclass(frozen=True)
class ExitStatus:
    """The end of a run: exit code, message and cause.

    Attributes:
        code: The launcher's exit code.
        message: The one message that says why the run ended; empty on success.
        traceback: The traceback of a bug in a child.
        lost: The name of the child that was killed, hangs or computes wrong numbers, if that is the cause.
        awaited: The name of a process on another host for which a child waited until its timeout.
        is_overdue: Whether a run was asked to stop, and its trainers have not saved on the disk.
        is_paused: Whether the trainers have saved in memory and exited as `is_to_pause` asked.
        is_faulty: Whether the lost child's device computes wrong numbers.
    """

    code: int
    message: str = ""
    traceback: str = ""
    lost: str = ""
    awaited: str = ""
    is_overdue: bool = False
    is_paused: bool = False
    is_faulty: bool = False

    @classmethod
    def stopped_by(cls, interrupts: Interrupts) -> "ExitStatus":
        """Return the status of a run that a signal ends without waiting for its trainers."""
        if interrupts.at_once:
            return cls(interrupts.code, "stopped at once, without saving")
        return cls(interrupts.code, is_overdue=True)

    def followed_by(self, message: str) -> "ExitStatus":
        """Return the status of a failure with another line after the message."""
        text = f"{self.message}\nlockstep: {message}" if self.message else message
        return replace(self, code=self.code or 1, message=text)


@dataclass
class Child:
    """A child process: what it has reported, and whether it is well."""

    name: str
    entry: str
    process: BaseProcess | ForkedProcess
    control: Pipe
    last_active: float  # when it last sent a message or updated its board (monotonic clock)
    spares: list[tuple[Any, ...]]  # arguments to start it again with
    board: StatusBoard | None = None
    board_count: int = 0
    listening: bool = True  # until it closes its end of the control pipe
    failure: Failed | None = None
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    @property
    def doing(self) -> str:
        return self.board.read() if self.board else "starting"

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process, as SIGSTOP does."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:  # it has exited
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def note_activity(self) -> None:
        """Update `last_active` if the status board has changed since the last call."""
        count = self.board.count() if self.board else 0
        if count != self.board_count:
            self.board_count, self.last_active = count, time.monotonic()

    def describe_silence(self) -> str:
        """Describe a child that has exited, or stands still, without having said why."""
        code = self.process.exitcode
        if code is None:
            seconds = time.monotonic() - self.last_active
            return f"{self.text} has stood still for {seconds:.0f} s at: {self.doing}"
        return f"{self.text} {describe_exit(code)} at: {self.doing}"

    def is_well(self) -> bool:
        """Return whether the child is working or has reported that it is done.

        A child reports that after its last work, so how its process exits afterwards does not matter.
        """
        return self.failure is None and (self.is_running or self.finished is not None)


def describe_exit(code: int) -> str:
    """Describe the exit code of a process that should not have exited."""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}{_HINTS.get(-code, '')}"
    return f"left with exit code {code}"


def close_connections(arguments: Iterable[Any]) -> None:
    """Close this process's copies of connections among a child's arguments, also in lists and dicts."""
    for argument in arguments:
        if isinstance(argument, Connection):
            argument.close()
        elif isinstance(argument, list | dict):
            close_connections(argument.values() if isinstance(argument, dict) else argument)
