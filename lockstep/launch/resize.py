"""The command `lockstep resize`: give a run other devices while it trains.

    lockstep resize runs/try1 devices=[cpu,cpu,cpu]     three trainers instead of what the run has
    lockstep resize runs/try1 +1                        one more
    lockstep resize runs/try1 -1                        one fewer

The run takes a checkpoint in memory at the end of its step and resumes on the other devices. It needs
logical_ranks (the same bits) or global_batch_size (the same training up to rounding).

It writes a request into the run's folder, so it needs no port: a file that appears whole, by a link that
fails if there is one already. The run's launcher removes it and writes the answer (resize_handler.py).
"""

import dataclasses
import json
import math
import os
import re
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from lockstep import config as configuration
from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths, remove_useless, write_text
from lockstep.runs.folder import is_running
from lockstep.text import handle_closed_pipe
from lockstep.typed import convert_record

REQUEST, ANSWER = "resize.json", "resize_answer.json"
_MOST_BYTES = 1 << 16
_MOST_DEVICES = 1024
_LOOK_SECONDS = 0.02
_HINT_SECONDS = 30.0  # after which the command says that it still waits
_CHANGE = re.compile(r"[+-]\d{1,3}")

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
        remove_useless(temporary)
    return request


def read_request(folder: Path) -> Request | None:
    """Return the request in a run's folder, or None. Raise UserError if the file is no request."""
    request = _read(folder / REQUEST, Request)
    if request and max(len(request.devices), abs(request.change)) > _MOST_DEVICES:
        raise _malformed(folder / REQUEST)
    return request


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
            return convert_record(json.loads(file.read(_MOST_BYTES)), kind)
    except FileNotFoundError:
        return None
    except TypeError:
        raise _malformed(path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: can't be read: {' '.join(str(error).split())}. Remove it.") from error


def _malformed(path: Path) -> UserError:
    return UserError(f"{path}: is not of this version of Lockstep. Remove it.")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Exit code 0: done; 2: refused, and the last line says why."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 2 or given[0].startswith("-"):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(given) else 2
    try:
        print(resize(Path(given[0]), given[1]))
    except UserError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("; ".join(["lockstep: stopped as asked", *interrupt.args]), file=sys.stderr)
        return 130
    return 0


@refusing_unusable_paths()
def resize(folder: Path, wish: str) -> str:
    """Ask a run's launcher for other devices and wait until it has resumed. Return a line for people.

    Args:
        folder: The run's folder.
        wish: 'devices=[...]', or a change of their number, '+1' or '-1'.

    Raises:
        UserError: The run refuses, has ended or is not on this machine, or its launcher can't answer.
        KeyboardInterrupt: Ctrl-C, with what became of the request.
    """
    names, change = _parse(wish)
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is not a run's folder. Give the folder of a run that trains now.")
    if not is_running(folder):
        raise UserError(f"{folder}: no launcher on this machine is training this run now")
    request = ask(folder, names, change)
    try:
        given = _await_answer(folder, request)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_withdraw(folder, request)) from None
    if given.state == "refused":
        raise UserError(f"{folder}: refused: {given.text}")
    return given.text


def _await_answer(folder: Path, request: Request) -> ResizeAnswer:
    hint_at = time.monotonic() + _HINT_SECONDS
    while True:
        if time.monotonic() > hint_at:
            text = f"{folder}: the run has not answered for {_HINT_SECONDS:.0f} s; it may be stopped"
            print(f"note: {text}. Ctrl-C withdraws the request.", file=sys.stderr, flush=True)
            hint_at = math.inf
        # In this order: the launcher answers before it removes the request, and removes that before it ends.
        runs, waits = is_running(folder), is_waiting(folder, request.number)
        given = _answer_to(folder, request)
        if given and given.state != "accepted":
            return given
        if not runs:
            discard(folder, request.number)
            raise UserError(f"{folder}: the run has ended before it could be resized")
        if not waits:
            raise UserError(
                f"{folder / REQUEST}: the request has gone without an answer. "
                "The run's output says whether it was resized; if not, ask again."
            )
        time.sleep(_LOOK_SECONDS)


def _answer_to(folder: Path, request: Request) -> ResizeAnswer | None:
    given = read_answer(folder)
    return given if given and given.number == request.number else None


def _withdraw(folder: Path, request: Request) -> str:
    """Remove the request, unless the launcher has answered it. Return what became of it, for people."""
    if not _answer_to(folder, request):
        discard(folder, request.number)
    given = _answer_to(folder, request)  # again: it may have been accepted just before it was removed
    if given:
        return f"the request is {given.state} already: see the run's output"
    return "the request is withdrawn"


def _parse(wish: str) -> tuple[tuple[str, ...], int]:
    if _CHANGE.fullmatch(wish) and int(wish):
        return (), int(wish)
    config, _ = configuration.resolve([configuration.read_command_line([wish])])
    if not wish.startswith("devices=") or not config.devices:
        raise UserError(f"{wish!r}: must be devices=[...], +1 or -1")
    return config.devices, 0


if __name__ == "__main__":
    handle_closed_pipe()
    sys.exit(main())
