"""Tables of labels: labels.csv or labels.parquet, with the columns path and label.

With `task: multilabel` a label is any number of names, separated by ';'. Instead of the column label there
may be a column for each class, which is 1 in the rows of its images and 0 in others.
"""

import csv
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lockstep.config.tasks import Task
from lockstep.errors import UserError
from preprocessing.folders import find_images
from preprocessing.listing import LeftOut, SourceImage

NAMES = ("labels.csv", "labels.parquet")
_COLUMNS = ("path", "label")
_NO_CLASS = " With task=multilabel its image is one without a class."
_BITS = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}


class Row(NamedTuple):
    """A row of a table. `place` names it in messages: "line 5"."""

    place: str
    path: str
    label: str
    classes: tuple[str, ...] = ()  # with `task: multilabel`


class Columns(NamedTuple):
    """The places of a table's columns: of the path, of the label (-1: none), and of each class."""

    path: int
    label: int
    of_classes: dict[str, int]

    @property
    def used(self) -> set[int]:
        """The columns that are read."""
        return {self.path, self.label, *self.of_classes.values()}


def find_table(folder: Path) -> Path | None:
    """Return the table of labels in a folder, or None."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def list_table(table: Path, left_out: list[LeftOut], task: Task) -> tuple[list[str], list[SourceImage]]:
    """Return the classes in order, and the images in the order of the table.

    Classes are sorted by name, or by number if all labels are whole numbers. Columns of classes keep their
    order.

    Args:
        table: The table; its paths are relative to its folder.
        left_out: Gets the images of the folder that the table does not name, and the table's columns that are
            not read.
        task: Whether a row has one class, or any number of them.

    Raises:
        UserError: The table can't be read, names a missing file, or names a file twice.
    """
    multilabel = task == "multilabel"
    columns, rows = _read(table, multilabel, left_out)
    _check(table, rows, multilabel)
    classes = list(columns.of_classes)
    if not classes:
        names = {name for row in rows for name in (row.classes if multilabel else (row.label,))}
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        classes = sorted(names, key=lambda name: (int(name) if numbers else 0, name))
    if not classes:
        raise UserError(f"{table}: no image has a class. Write the names of its classes into each row.")
    label_of = {name: label for label, name in enumerate(classes)}
    images = []
    for row in rows:
        several = tuple(sorted({label_of[name] for name in row.classes}))
        label = several if multilabel else label_of[row.label]
        images.append(SourceImage(os.path.normpath(row.path), label, str(table.parent / row.path)))
    named = {_name_in_folder(table, image.name) for image in images}
    below: list[LeftOut] = []
    others = [name for name in find_images(table.parent, below) if name not in named]
    left_out += [LeftOut(f"{table.parent}/{name}", f"not in {table.name}") for name in others]
    kept = {str(table), *(image.path for image in images)}
    left_out += [each for each in below if each.place not in kept]
    return classes, images


def _check(table: Path, rows: list[Row], multilabel: bool) -> None:
    """Raise UserError for an empty value, a missing file, or a file that is named twice."""
    seen: dict[str, Row] = {}
    for row in rows:
        if not row.path or not (row.label or multilabel):
            cure = "Complete or remove it." + (_NO_CLASS if row.path else "")
            raise UserError(f"{table}: {row.place} lacks a path or a label. {cure}")
        if not os.path.isfile(table.parent / row.path):  # Path.is_file() raises for a name that is too long
            raise UserError(f"{table}: {row.place} names {row.path}, which is no file in {table.parent}.")
        name = _name_in_folder(table, row.path)
        if name in seen:
            raise UserError(f"{table}: {row.place} names {row.path} again, after {seen[name].place}.")
        seen[name] = row
    if not rows:
        raise UserError(f"{table}: has no rows. Write a path and a label into each.")


def _name_in_folder(table: Path, path: str) -> str:
    """Return a path relative to the table's folder if it is absolute and inside."""
    return os.path.normpath(path).removeprefix(f"{os.path.abspath(table.parent)}/")


def _read(table: Path, multilabel: bool, left_out: list[LeftOut]) -> tuple[Columns, list[Row]]:
    """Return the columns and the rows of a table. Columns that are not read are added to `left_out`."""
    read = _read_parquet if table.suffix == ".parquet" else _read_csv
    names, values = read(table)
    columns = _columns(table, names, multilabel)
    unread = [name for place, name in enumerate(names) if place not in columns.used]
    left_out += [LeftOut(f"{table}: {name}", "a column that is not read") for name in unread]
    return columns, [_row_of(table, columns, len(names), place, row, multilabel) for place, row in values]


def _row_of(
    table: Path, columns: Columns, n_columns: int, place: str, values: list[str], multilabel: bool
) -> Row:
    if len(values) <= max(columns.used):
        raise UserError(f"{table}: {place} has {len(values)} columns. Complete it.")
    if any(values[n_columns:]):
        raise UserError(
            f"{table}: {place} has {len(values)} columns, the first line names {n_columns}. Put text with a "
            "comma in quotes, and separate several classes by ';'."
        )
    path = values[columns.path]
    if columns.label >= 0:
        label = values[columns.label]
        names = [name.strip() for name in label.split(";")] if multilabel else []
        return Row(place, path, label, tuple(filter(None, names)))
    classes = []
    for name, column in columns.of_classes.items():
        value = values[column].casefold()
        if value not in _BITS:
            raise UserError(f"{table}: {place} has {values[column]!r} in the column {name}. Write 0 or 1.")
        if _BITS[value]:
            classes.append(name)
    return Row(place, path, "", tuple(classes))


Table = tuple[list[str], list[tuple[str, list[str]]]]  # names of columns; place and values of each row


def _read_csv(table: Path) -> Table:
    try:
        with open(table, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.reader(file)
            names = [name.strip() for name in next(reader, [])]
            rows = [(f"line {reader.line_num}", [v.strip() for v in values]) for values in reader if values]
            return names, rows
    except OSError as error:
        raise UserError(f"{table}: can't be read: {error.strerror}") from error
    except csv.Error as error:
        raise UserError(f"{table}: is not a table of comma-separated values: {error}") from error


def _read_parquet(table: Path) -> Table:
    read = next((read for name, read in _PARQUET_READERS.items() if importlib.util.find_spec(name)), None)
    if read is None:
        raise UserError(
            f"{table}: can't be read: neither pyarrow nor pandas is installed. Install one, or save the "
            f"table as {NAMES[0]}."
        )
    try:
        columns = read(table)
    except Exception as error:  # both raise many types for damaged files
        raise UserError(f"{table}: is not a whole Parquet file: {error}") from error
    rows = zip(*columns.values(), strict=True)
    texts = [(f"row {number}", [_as_text(value) for value in row]) for number, row in enumerate(rows, 1)]
    return list(columns), texts


def _read_with_pyarrow(table: Path) -> dict[str, list[object]]:
    import pyarrow.parquet

    columns: dict[str, list[object]] = pyarrow.parquet.read_table(table).to_pydict()
    return columns


def _read_with_pandas(table: Path) -> dict[str, list[object]]:
    import pandas

    columns: dict[str, list[object]] = pandas.read_parquet(table).to_dict("list")
    return columns


_PARQUET_READERS = {"pyarrow": _read_with_pyarrow, "pandas": _read_with_pandas}


def _as_text(value: object) -> str:
    """Return a value as text; None, and pandas' NaN for it, as ''. Lists of names are joined by ';'."""
    if not isinstance(value, str) and isinstance(value, Iterable):
        return ";".join(map(str, value))
    return "" if value is None or value != value else str(value).strip()  # noqa: PLR0124 (NaN)


def _columns(table: Path, names: list[str], multilabel: bool) -> Columns:
    """Return the columns. Raise UserError if one is missing."""
    known = [name.strip().casefold() for name in names]
    if multilabel and "path" in known and "label" not in known:
        of_classes = {name: place for place, name in enumerate(names) if known[place] != "path" and name}
        if not of_classes or len(set(known)) < len(known):
            raise UserError(
                f"{table}: has no column label, and no column of its own for each class. With task: "
                "multilabel its first line names path, and label or all classes once; it has: "
                f"{', '.join(names)[:200]}."
            )
        return Columns(known.index("path"), -1, of_classes)
    missing = [name for name in _COLUMNS if name not in known]
    if missing:
        raise UserError(
            f"{table}: has no column {' and no column '.join(missing)}. Its first line must name the columns "
            f"path and label; it has: {', '.join(names)[:200] or 'nothing'}."
            + (" Separate columns by commas." if len(names) == 1 and {";", "\t"} & set(names[0]) else "")
            + (" A column of 0 and 1 for each class is for task: multilabel." if "path" in known else "")
        )
    return Columns(known.index("path"), known.index("label"), {})
