"""From what processes have said, and when, to spans: Chrome's trace event format, complete events ("X")."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

Line = tuple[int, str]


def events_of(run: Path) -> list[dict[str, Any]]:
    """All processes' spans, each process by its number, times in microseconds since the first line.

    Raises UserError where the run has no trace, or a file of it can't be read.
    """
    paths = sorted((run / "trace").glob("*.txt"))
    if not paths:
        raise UserError(f"{run}: has no trace: train with trace=true")
    said = {path: _read(path) for path in paths}
    begin = min(lines[0][0] for lines in said.values() if lines)
    events: list[dict[str, Any]] = []
    for path, lines in said.items():
        name, _, pid = path.stem.rpartition(".")
        whose = {"pid": int(pid), "tid": int(pid)}
        events.append({"ph": "M", "name": "process_name", "args": {"name": f"{name} (pid {pid})"}, **whose})
        for (since, text), (until, _) in pairwise(lines):
            where, _, what = text.rpartition(": ") if "(" not in text else _before_bracket(text)
            span = {"name": what, "ts": (since - begin) / 1e3, "dur": (until - since) / 1e3}
            events.append({"ph": "X", "cat": name.split()[0], "args": {"at": where or text}, **span, **whose})
    return events


def _before_bracket(text: str) -> tuple[str, str, str]:
    """Splits 'epoch 1 step 2/3: meeting the others (a: b)' at its first colon, without the bracket."""
    where, _, what = text.partition("(")[0].rstrip().rpartition(": ")
    return where, "", what


def _read(path: Path) -> list[Line]:
    """A process's lines in order; the last may be cut short where it was killed."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [(int(time), text) for time, _, text in (line.partition(" ") for line in lines)]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as a trace: {error}") from error
