"""Files with the result of a validation: JSON with everything, CSV with a row per class."""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
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
    folder = _target_of(path).parent
    if not folder.is_dir():
        raise UserError(f"{path}: can't be written: there is no folder {folder}. Create it first.")
    if not os.access(folder if _is_replaced(path) else path, os.W_OK):
        raise UserError(f"{path}: can't be written: permission denied. Name another place.")


def _target_of(path: Path) -> Path:
    """Return the file behind links. Raise UserError if they lead in a circle."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise UserError(f"{path}: can't be written: its links lead in a circle. Name another file.")
    return target


def _is_replaced(path: Path) -> bool:
    """Return whether a new file takes the place of this one. A pipe or a device is written to instead."""
    return (path.is_file() or not path.exists()) and not str(path).startswith(_OUTPUTS)


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all, or into a pipe or a device."""
    if _is_replaced(path):
        write_text(_target_of(path), text)  # a link stays one
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
    _write(path, as_csv([["class", *columns], *zip(names, *columns.values(), strict=True)]))


def as_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV. Each ends with a line feed, and values with a line feed or a return are quoted."""
    lines = []
    for row in rows:
        line = io.StringIO()
        csv.writer(line).writerow(row)  # quotes the characters of its own line end, which are both
        lines.append(line.getvalue().removesuffix("\r\n") + "\n")
    return "".join(lines)
