"""How another host's launcher has ended, as this one's exit code and last line say it."""

from typing import Any

from lockstep.errors import PeerProblem
from lockstep.hosts.told import one_line

LONGEST = 2000  # letters of a line of another host's


class HostFailed(PeerProblem):
    """Another host has ended, or gives no sign of life. code: the exit code that this means here."""

    def __init__(self, host: int, text: str, code: int = 1) -> None:
        super().__init__(f"host {host}", text)
        self.code = code


def ended(host: int, end: Any) -> HostFailed:
    """The error that says how a host has ended. end: what it has told."""
    told = end if isinstance(end, dict) else {}
    text = one_line(told.get("text") or f"host {host}: its launcher has left", LONGEST)
    return HostFailed(host, text, exit_code(end) or 1)


def exit_code(end: Any) -> int:
    """What a host tells of it at its end; 0 where that is none."""
    code = end.get("code") if isinstance(end, dict) else None
    return code if type(code) is int and 0 < code < 256 else 0
