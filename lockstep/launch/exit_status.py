"""The exit status of a run, or of one attempt of it."""

from dataclasses import dataclass, replace


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

    def followed_by(self, message: str) -> "ExitStatus":
        """Return the status of a failure with another line after the message."""
        text = f"{self.message}\nlockstep: {message}" if self.message else message
        return replace(self, code=self.code or 1, message=text)
