"""The usual causes of a trainer that is slower than the others, and the slow trainer of a run."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from lockstep.doctor.report import Finding
from lockstep.report.runlog import read_run
from lockstep.runs.stragglers import BRIEF, CAUSES, sentence_of

_WIDTH = 80


def causes() -> Iterator[Finding]:
    """Yield the usual causes by phase, as progress lines and reports name them."""
    for cause, text in CAUSES.items():
        yield from _wrapped(BRIEF[cause], text)


def examine_run(folder: Path) -> Iterator[Finding]:
    """Yield which trainer makes the others of a run wait, and the usual causes.

    Raises:
        UserError: The folder is not a run's, or nothing of the run can be read.
    """
    run = read_run(folder)
    times = run.newest_times
    if times is None:
        yield Finding("waiting", "the log has no whole epoch of several trainers yet")
    elif times.straggler is None:
        yield Finding("waiting", "no single trainer makes the others wait notably")
    else:
        yield from _wrapped("waiting", sentence_of(times.straggler))
        yield from _wrapped(BRIEF[times.straggler.cause], CAUSES[times.straggler.cause])


def _wrapped(name: str, text: str) -> Iterator[Finding]:
    first, *others = textwrap.wrap(text, _WIDTH)
    yield Finding(name, first)
    for line in others:
        yield Finding("", line)
