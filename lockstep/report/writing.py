"""Writes the report of runs that have been read."""

import time
from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import write_text
from lockstep.report import page, sections, summary, theme
from lockstep.report.runlog import RunLog


def write_report(runs: list[RunLog], n_images: int) -> Path:
    """Writes report.html and report/*.png into the first run's folder; returns the path of the page.

    n_images: validation images to try the first run's network on; 0: none. What could not be used is added to
    the runs' notes. Raises UserError where nothing can be written there.
    """
    theme.apply()
    folder = runs[0].folder
    pictures = folder / "report"
    try:
        pictures.mkdir(exist_ok=True)
        parts = [
            sections.learning(runs, pictures),
            sections.time_split(runs, pictures),
            sections.filters(runs, pictures),
            sections.examples(runs[0], n_images) if n_images else "",
            sections.configuration(runs),
        ]
    except OSError as error:
        raise UserError(f"{folder}: the report can't be written: {error}") from error
    now = time.time()
    top = page.tiles(runs[0]) if len(runs) == 1 else page.runs_table(runs, now)
    notes = page.notes([note for run in runs for note in run.notes])
    lead = summary.lead(runs[0], now) if len(runs) == 1 else f"{len(runs)} runs over each other"
    footer = f"Written {summary.date(now)} by python -m lockstep.report. The charts are in {pictures}, too."
    title = ", ".join(run.name for run in runs)
    write_text(folder / "report.html", page.whole_page(title, lead, [top, notes, *parts], footer))
    return folder / "report.html"
