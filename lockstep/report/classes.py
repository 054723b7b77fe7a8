"""The report's section on classes: a table that can be sorted, and a heat map of confusions."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from lockstep.errors import UserError
from lockstep.report import page
from lockstep.report.runlog import RunLog
from lockstep.runs.dataset_description import read_description
from lockstep.runs.metrics import AnswerCounts, ClassMetrics

MOST_CLASSES = 100  # in the heat map
_WORST = 30  # shown of more classes
_PIXELS = 420


def classes(run: RunLog) -> str:
    """Return the metrics of each class in the newest validation, as HTML, or '' if the log has none."""
    if run.columns:
        return _of_labels(run)
    if run.answers is None:
        return ""
    names, metrics = _names(run, run.answers.n_classes), run.answers.by_class()
    means = metrics.means()
    text = (
        f"Validation of epoch {run.classes_epoch}: macro F1 {means['macro_f1']:.2%}, weighted F1 "
        f"{means['weighted_f1']:.2%}, balanced accuracy {means['balanced_accuracy']:.2%}. "
        "A click on a column's head sorts the table."
    )
    return page.section(
        "Classes",
        page.paragraph(text, "muted"),
        _table(names, metrics.columns()),
        _heatmap(run.answers, names, metrics),
    )


def _of_labels(run: RunLog) -> str:
    """Return the metrics of each class with `task: multilabel`."""
    names = _names(run, len(run.columns["support"]))
    means = [
        f"{title} {value:.2%}"
        for title, key in (
            ("mean average precision", "mean_average_precision"),
            ("macro F1", "macro_f1"),
            ("micro F1", "micro_f1"),
        )
        if isinstance(value := run.means.get(key), float)
    ]
    text = f"Validation of epoch {run.classes_epoch}: {', '.join(means)}. "
    text += "A click on a column's head sorts the table."
    return page.section("Classes", page.paragraph(text, "muted"), _table(names, run.columns))


def _names(run: RunLog, n_classes: int) -> list[str]:
    """Return the classes' names, or their numbers if the run folder does not have them."""
    try:
        description = read_description(run.folder)
    except UserError as error:
        run.notes.append(str(error))
        description = None
    known = description.class_names if description else ()
    return [known[number] if number < len(known) else f"class {number}" for number in range(n_classes)]


def _table(names: list[str], columns: Mapping[str, Sequence[float]]) -> str:
    """Return a table with the values of each class, of which the first is its number of images."""
    heads = ["Class", *(name.replace("_", " ").capitalize() for name in columns)]
    rows = [
        [escape(name), f"{support:,.0f}", *(f"{value:.4f}" for value in values)]
        for name, support, *values in zip(names, *columns.values(), strict=True)
    ]
    table = page.table(heads, rows, numeric=range(1, len(heads)), sortable=True)
    return f"<details open><summary>{len(names):,} classes</summary>{table}</details>"


def _heatmap(counts: AnswerCounts, names: list[str], metrics: ClassMetrics) -> str:
    """Return the confusions as a grid, a row per class; of many classes, those with the least F1."""
    if counts.n_classes <= MOST_CLASSES:
        shown, caption = np.arange(counts.n_classes), "Rows: the true class. Columns: the answer."
    else:
        present = np.flatnonzero(metrics.support > 0)
        shown = np.sort(present[np.argsort(metrics.f1[present], kind="stable")][:_WORST])
        caption = f"The {len(shown)} classes with the least F1. Rows: the true class. Columns: the answer."
    place = {int(number): where for where, number in enumerate(shown)}
    cells = []
    for label, answer, count in counts.triples():
        if label in place and answer in place:
            share = count / max(1, int(metrics.support[label]))
            title = f"{names[label]} taken for {names[answer]}: {count:,} images, {share:.1%}"
            colour = "compute" if label == answer else "exchange"
            cells.append(
                f'<rect x="{place[answer]}" y="{place[label]}" width="1" height="1" '
                f'style="fill: var(--{colour}); fill-opacity: {max(0.04, share):.3f}">'
                f"<title>{escape(title)}</title></rect>"
            )
    size = len(shown)
    drawing = (
        f'<svg class="confusion" viewBox="0 0 {size} {size}" role="img" '
        f'aria-label="confusion matrix" style="max-width: {_PIXELS}px">{"".join(cells)}</svg>'
    )
    return page.figure("Confusion matrix", drawing, f"{caption} Point at a field for its classes.")
