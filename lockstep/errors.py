"""Exceptions for failures of a run that are not bugs, warnings, and helpers for their messages."""

import difflib
import sys
import warnings
from collections.abc import Iterable

BATCH_KEYS = "batch_size (global_batch_size, if it is set) or n_slots"  # to lower where memory is short


class UserError(ValueError):
    """Something that the user gave (a key, a file, a device) can't be used. The message says what to do."""

    code = 2  # the launcher's exit code


class NothingToTrain(UserError):
    """The run to resume has trained all its epochs, or has ended early."""


class DeviceFault(RuntimeError):
    """This process's device has computed something else than two others did."""


class UndecidedFault(RuntimeError):
    """One of two devices computes wrong numbers, and none could decide which."""


class PeerProblem(RuntimeError):
    """A failure of another process, called `peer`, that this process depends on."""

    code = 1

    def __init__(self, peer: str, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class PeerLost(PeerProblem):
    """The other process has closed its end of a pipe: it died or exited."""


class DeadlinePassed(PeerProblem):
    """The other process did not answer within `timeout` seconds."""


class Garbled(PeerProblem):
    """The bytes received over a pipe are not a message of this program."""


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is not this package's."""
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] == "lockstep":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, at most 200 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def nearest(key: str, known: Iterable[str]) -> str:
    """Return " (did you mean '...'?)" with the known name most like `key`, or '' if none is similar."""
    match = nearest_of(key, known)
    return f" (did you mean '{match}'?)" if match else ""


def nearest_of(key: str, known: Iterable[str]) -> str:
    """Return the known name most like `key`, or '' if none is similar."""
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), "")
