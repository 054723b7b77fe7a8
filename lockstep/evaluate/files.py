"""Files with the result of a validation: JSON with everything, CSV with a row per class."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths, write_text
from lockstep.runs.metrics import AnswerCounts, ClassMetrics
from lockstep.runs.multilabel import LabelMetrics

_OUTPUTS = ("/dev/std", "/dev/fd/", "/proc/")  # names of a program's open files, which can't be replaced


@refusing_unusable_paths()
def check_place(path: Path) -> None:
    """Raise UserError if a result can't be written to this path, before the result is computed."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder. Name a file.")
    if not path.parent.is_dir():
        raise UserError(f"{path}: can't be written: there is no folder {path.parent}. Create it first.")


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all; a pipe or a device is written to, not replaced."""
    is_file = path.is_file() or not path.exists()
    if is_file and not str(path).startswith(_OUTPUTS):
        write_text(path.resolve(), text)  # a link stays one
        return
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from error


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
    _write(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


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
    _write(path, text.getvalue())
