"""Conversion of a run's recorded phases to a timeline."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths
from lockstep.trace.chrome import ChromeTrace, Row

Line = tuple[int, str]
_BARRIER = "waiting for the others"  # a trainer's phase at a barrier of a step (lockstep/sync)


@dataclass
class _Wait:
    """A trainer's waiting in a step: its row, when it arrived and how long it waited, in microseconds."""

    row: Row
    arrival: float
    waited: float = 0.0


@refusing_unusable_paths()
def trace_of(run: Path) -> ChromeTrace:
    """Return the spans of all processes, with times since the first line.

    In each step, the trainer that waited least for the others is marked as the last.

    Args:
        run: The run's folder.

    Raises:
        UserError: The run has no trace, or one of its files can't be read.
    """
    folder = run / "trace"
    # is_dir() raises OSError for a path that is too long; in Python 3.13, glob() does not.
    found = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    paths = [path for path in found if path.stem.rpartition(".")[2].isdecimal()]  # others are not a run's
    if not paths:
        raise UserError(f"{run}: has no trace: train with trace=true")
    recorded = dict(sorted(((path, _read(path)) for path in paths), key=lambda item: item[1][:1]))
    begin = min((lines[0][0] for lines in recorded.values() if lines), default=0)
    trace, waits = ChromeTrace(), dict[str, dict[str, _Wait]]()  # by step and trainer
    for path, lines in recorded.items():
        name, _, pid = path.stem.rpartition(".")
        row = Row(int(pid), int(pid))
        trace.name(row, f"{name} (pid {pid})", "process")
        own: dict[str, _Wait] = {}
        for (since, text), (until, _) in pairwise(lines):
            step, phase = _split(text)
            times = (since - begin) / 1e3, (until - since) / 1e3
            trace.span(row, phase, name.split()[0], *times, at=step or text)
            if phase == _BARRIER:
                own.setdefault(step, _Wait(row, times[0])).waited += times[1]
        for step, wait in own.items():  # after a restart, a step that is repeated replaces the former one
            waits.setdefault(step, {})[name] = wait
    for step, trainers in waits.items():
        _mark_last(trace, step, list(trainers.values()))
    return trace


def _mark_last(trace: ChromeTrace, step: str, waits: list[_Wait]) -> None:
    """Mark who waited least in a step, when it arrived. A lone trainer is not marked."""
    if len(waits) < 2:
        return
    last = min(waits, key=lambda wait: wait.waited)
    others = sum(wait.waited for wait in waits if wait is not last) / (len(waits) - 1)
    milliseconds = round((others - last.waited) / 1e3, 3)
    trace.instant(last.row, "last", "trainer", last.arrival, at=step, others_waited_ms=milliseconds)


def _split(text: str) -> tuple[str, str]:
    """Split 'epoch 1 step 2/3: validating (a: b)' at its last colon outside of the bracket."""
    step, _, phase = text.partition("(")[0].rstrip().rpartition(": ")
    return step, phase


def _read(path: Path) -> list[Line]:
    """Return a process's lines in order. The last line of a killed process may be incomplete."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [(int(time), text) for time, _, text in (line.partition(" ") for line in lines)]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as a trace: {error}") from error
