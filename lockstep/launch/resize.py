"""The command `lockstep resize`: give a run other devices while it trains.

    lockstep resize runs/try1 devices=[cpu,cpu,cpu]     three trainers instead of what the run has
    lockstep resize runs/try1 +1                        one more
    lockstep resize runs/try1 -1                        one fewer

The run takes a checkpoint in memory at the end of its step and resumes on the other devices. It needs
logical_ranks (the same bits) or global_batch_size (the same training up to rounding).
"""

import math
import re
import sys
import time
from pathlib import Path

from lockstep import config as configuration
from lockstep.errors import UserError
from lockstep.runs import resize_request
from lockstep.runs.folder import is_running
from lockstep.text import handle_closed_pipe

_LOOK_SECONDS = 0.02
_HINT_SECONDS = 30.0  # after which the command says that it still waits
_CHANGE = re.compile(r"[+-]\d{1,3}")


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


def resize(folder: Path, wish: str) -> str:
    """Ask a run's launcher for other devices and wait until it has resumed. Return a line for people.

    Args:
        folder: The run's folder.
        wish: 'devices=[...]', or a change of their number, '+1' or '-1'.

    Raises:
        UserError: The run refuses, has ended or is not on this machine, or its launcher can't answer.
        KeyboardInterrupt: Ctrl-C, with what became of the request.
    """
    devices, change = _parse(wish)
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is not a run's folder. Give the folder of a run that trains now.")
    if not is_running(folder):
        raise UserError(f"{folder}: no launcher on this machine is training this run now")
    request = resize_request.ask(folder, devices, change)
    try:
        given = _await_answer(folder, request)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_withdraw(folder, request)) from None
    if given.state == "refused":
        raise UserError(f"{folder}: refused: {given.text}")
    return given.text


def _await_answer(folder: Path, request: resize_request.Request) -> resize_request.ResizeAnswer:
    hint_at = time.monotonic() + _HINT_SECONDS
    while True:
        if time.monotonic() > hint_at:
            text = f"{folder}: the run has not answered for {_HINT_SECONDS:.0f} s; it may be stopped"
            print(f"note: {text}. Ctrl-C withdraws the request.", file=sys.stderr, flush=True)
            hint_at = math.inf
        # In this order: the launcher answers before it removes the request, and removes that before it ends.
        runs, waits = is_running(folder), resize_request.is_waiting(folder, request.number)
        given = _answer_to(folder, request)
        if given and given.state != "accepted":
            return given
        if not runs:
            resize_request.discard(folder, request.number)
            raise UserError(f"{folder}: the run has ended before it could be resized")
        if not waits:
            raise UserError(
                f"{folder / resize_request.REQUEST}: the request has gone without an answer. "
                "The run's output says whether it was resized; if not, ask again."
            )
        time.sleep(_LOOK_SECONDS)


def _answer_to(folder: Path, request: resize_request.Request) -> resize_request.ResizeAnswer | None:
    given = resize_request.read_answer(folder)
    return given if given and given.number == request.number else None


def _withdraw(folder: Path, request: resize_request.Request) -> str:
    """Remove the request, unless the launcher has answered it. Return what became of it, for people."""
    if not _answer_to(folder, request):
        resize_request.discard(folder, request.number)
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
