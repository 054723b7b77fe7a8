"""Requests to change the devices of a run while it trains: one file in the run's folder, and its answer.

The request appears whole, by a link that fails if there is one already, so there is one at a time. The
launcher removes it and writes the answer. Nothing here needs a port or torch.
"""

import dataclasses
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.errors import UserError
from lockstep.files import write_text

REQUEST, ANSWER = "resize.json", "resize_answer.json"
_MOST_BYTES = 1 << 16
_MOST_DEVICES = 1024

T = TypeVar("T", "Request", "ResizeAnswer")


@dataclass(frozen=True)
class Request:
    """A wish for other devices.

    Attributes:
        number: Identifies the request.
        devices: The new devices; () to change their number by `change`.
    """

    number: str
    devices: tuple[str, ...] = ()
    change: int = 0


@dataclass(frozen=True)
class ResizeAnswer:
    """The launcher's answer to a request: what became of it, and a line for people."""

    number: str
    state: Literal["accepted", "refused", "done"]
    text: str


def ask(folder: Path, devices: tuple[str, ...], change: int) -> Request:
    """Put a request into a run's folder.

    Raises:
        UserError: There is one already, or the folder can't be written.
    """
    request = Request(uuid.uuid4().hex, devices, change)
    temporary = folder / f".{REQUEST}.{request.number}"
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(request)))
        os.link(temporary, folder / REQUEST)
    except FileExistsError:
        raise UserError(f"{folder / REQUEST}: another request waits for its answer. Try later.") from None
    except OSError as error:
        raise UserError(f"{folder}: the request can't be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return request


def read_request(folder: Path) -> Request | None:
    """Return the request in a run's folder, or None. Raise UserError if the file is no request."""
    path = folder / REQUEST
    request = _read(path, Request)
    if request is None:
        return None
    names = request.devices
    is_well_formed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    is_well_formed = is_well_formed and type(request.change) is int and abs(request.change) <= _MOST_DEVICES
    if not is_well_formed or len(names) > _MOST_DEVICES:
        raise UserError(f"{path}: is not a request to resize a run. Remove it.")
    return dataclasses.replace(request, devices=tuple(names))


def read_answer(folder: Path) -> ResizeAnswer | None:
    """Return the last answer in a run's folder, or None. Raise UserError if the file is no answer."""
    return _read(folder / ANSWER, ResizeAnswer)


def answer(folder: Path, given: ResizeAnswer) -> None:
    """Write the answer to a request, and remove the request unless it is accepted only.

    Raises:
        UserError: The folder can't be written.
    """
    write_text(folder / ANSWER, json.dumps(dataclasses.asdict(given)))
    if given.state != "accepted":
        discard(folder, given.number)


def is_waiting(folder: Path, number: str) -> bool:
    """Return whether the request in a run's folder is the one with this number."""
    try:
        request = read_request(folder)
    except UserError:
        return False
    return request is not None and request.number == number


def discard(folder: Path, number: str | None = None) -> None:
    """Remove the request in a run's folder, if there is one. Raise UserError if that fails.

    Args:
        number: Of the only request to remove, since another one may have taken its place; None for any file.
    """
    if number is not None and not is_waiting(folder, number):
        return
    try:
        (folder / REQUEST).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder / REQUEST}: can't be removed: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file that may be a named pipe, whose writer would otherwise be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        if not path.exists():  # asked twice a second
            return None
        with open(path, "rb", opener=_open_at_once) as file:
            values: Any = json.loads(file.read(_MOST_BYTES))
        found = kind(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: can't be read: {' '.join(str(error).split())}. Remove it.") from error
    if not isinstance(found.number, str):
        raise UserError(f"{path}: its number is no text. Remove it.")
    return found
