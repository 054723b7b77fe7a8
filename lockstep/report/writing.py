"""Writing of the report."""

import time
from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import write_text
from lockstep.report import page, sections, summary, theme
from lockstep.report.classes import classes
from lockstep.report.runlog import RunLog


def place_of(runs: list[RunLog]) -> Path:
    """Return the folder for a report: the run's own, or for several runs one beside them."""
    return runs[0].folder if len(runs) == 1 else runs[0].folder.parent / "comparison"


def write_report(
    runs: list[RunLog], folder: Path, n_images: int, reload_seconds: float | None = None
) -> Path:
    """Write report.html and report/*.png.

    Args:
        runs: The runs. Problems with their files are added to their notes.
        folder: The folder to write into, created if missing.
        n_images: Validation images on which to test the first run's network; 0: none.
        reload_seconds: Seconds after which the page reloads itself; None: it does not.

    Returns:
        The path of the page.

    Raises:
        UserError: The folder can't be written to.
    """
    theme.apply()
    charts_folder = folder / "report"
    try:
        charts_folder.mkdir(parents=True, exist_ok=True)
        parts = [
            sections.learning(runs, charts_folder),
            classes(runs[0]) if len(runs) == 1 else "",
            sections.time_split(runs, charts_folder),
            sections.filters(runs, charts_folder),
            sections.augmentation(runs[0], charts_folder) if n_images else "",
            sections.examples(runs[0], n_images) if n_images else "",
            sections.configuration(runs),
        ]
    except OSError as error:
        raise UserError(f"{folder}: the report can't be written: {error}") from error
    now = time.time()
    top = page.tiles(runs[0]) if len(runs) == 1 else page.runs_table(runs, now)
    notes = page.notes([note for run in runs for note in run.notes])
    lead = summary.lead(runs[0], now) if len(runs) == 1 else f"{len(runs)} runs over each other"
    footer = (
        f"Written {summary.date(now)} by python -m lockstep.report. The charts are in {charts_folder}, too."
    )
    title = ", ".join(run.name for run in runs)
    write_text(
        folder / "report.html", page.whole_page(title, lead, [top, notes, *parts], footer, reload_seconds)
    )
    return folder / "report.html"
