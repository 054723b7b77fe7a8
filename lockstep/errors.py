"""The ways in which a run can fail that are not bugs."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave (a key, a file, a device) can't be used; the message says what to do."""

    code = 2  # of a launcher that ends with it


class PeerProblem(RuntimeError):
    """Something is wrong with the process called `peer`, seen by one that needs it."""

    code = 1

    def __init__(self, peer: str, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class PeerLost(PeerProblem):
    """The other process has closed its end of a pipe: it has died or has left."""


class DeadlinePassed(PeerProblem):
    """The other process did not answer within `wait_deadline` seconds."""


class Garbled(PeerProblem):
    """What came over a pipe is not what a process of this program sends."""


def first_line(error: BaseException) -> str:
    """What a library's error says, for one line of ours: others write pages. At most 200 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def nearest(key: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or '' where nothing known is like `key`."""
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
