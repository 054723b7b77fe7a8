"""Files with the result of a validation: JSON with everything, CSV with a row per class."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.files import write_text
from lockstep.runs.metrics import AnswerCounts, ClassMetrics
from lockstep.runs.multilabel import LabelMetrics


def write_json(
    path: Path,
    facts: Mapping[str, Any],
    metrics: ClassMetrics | LabelMetrics,
    names: Sequence[str],
    counts: AnswerCounts | None,
) -> None:
    """Write a validation as one JSON object.

    Args:
        path: The file; one that exists is replaced.
        facts: The checkpoint, the numbers of images and the errors.
        metrics: Of every class.
        names: One name per class.
        counts: The answers, if an image has one class.

    Raises:
        UserError: The file can't be written.
    """
    columns = metrics.columns()
    rows = zip(names, *columns.values(), strict=True)
    classes = [dict(zip(("class", *columns), row, strict=True)) for row in rows]
    result = {**facts, **metrics.means(), "classes": classes}
    if counts:
        result["confusion"] = counts.triples()
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def write_csv(path: Path, metrics: ClassMetrics | LabelMetrics, names: Sequence[str]) -> None:
    """Write a row of metrics per class. Arguments as of write_json.

    Raises:
        UserError: The file can't be written.
    """
    columns = metrics.columns()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *columns])
    writer.writerows(zip(names, *columns.values(), strict=True))
    write_text(path, text.getvalue())
