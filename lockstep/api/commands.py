"""The commands of Lockstep as programs: how they are started, and the line with which they end."""

import os
import sys


def lockstep_command(words: list[str]) -> list[str]:
    """Return the command `lockstep` with these words, run by the caller's Python."""
    return [sys.executable, "-P", "-m", "lockstep.cli", *words]


def environment() -> dict[str, str]:
    """Return the environment in which a run imports what the caller can import, from the same places."""
    path = [os.path.abspath(place) for place in sys.path]  # '' is the working directory
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def last_line(text: str) -> str:
    """Return the last line that is not blank, or ''."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def without_name(line: str) -> str:
    """Return a program's error without the program's name before it."""
    return line.removeprefix("lockstep: ")
