"""A dataset's description in a run's folder: dataset.json and dataset_mean.npy.

They are there so that `classify.py` works without the dataset. A run may be resumed on another dataset, or
with another mean. The description before is then kept for the run's older checkpoints, in the files
dataset-until-CHECKPOINT.json and dataset_mean-until-CHECKPOINT.npy.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.data.description import Description
from lockstep.data.manifest import ORIENTATIONS, RESIZES
from lockstep.errors import UserError
from lockstep.files import read_array, write_array, write_text
from lockstep.runs.kept import mark_for, mark_of, marks_after
from lockstep.text import as_name

NAME, MEAN_NAME = "dataset.json", "dataset_mean.npy"


def write_description(folder: Path, description: Description, start: str = "") -> None:
    """Write both files, and keep those of the checkpoints so far if they differ.

    A class that the new data does not name keeps its name, with which later data is compared.

    Args:
        folder: The run's folder.
        description: Of the data that the run is trained on from now on.
        start: The name of the checkpoint that the run resumes from, such as 'epoch_0003'; '' from scratch.

    Raises:
        UserError: A file can't be read or written.
    """
    known = read_description(folder, start) if start else None
    if known:
        names = _with_known(description.class_names, known.class_names)
        description = replace(description, class_names=names)
    if known and not known.same_as(description):
        _write(known, *_paths(folder, mark_of(start)))
    for mark in marks_after(folder, NAME, start):
        _remove(_paths(folder, mark))
    _write(description, *_paths(folder))


def _with_known(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of classes in which a class without one, which has its number, keeps the one it had."""
    pairs = zip(names, known, strict=True)
    return tuple(then if now == str(number) else now for number, (now, then) in enumerate(pairs))


def _write(description: Description, path: Path, mean_path: Path) -> None:
    words = {key: getattr(description, key) for key in ("class_names", "resize", "orientation")}
    write_array(mean_path, description.mean)
    write_text(path, json.dumps(words, indent=0))


def _remove(paths: tuple[Path, Path]) -> None:
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{paths[0]}: can't be removed: {error.strerror}") from error


def _paths(folder: Path, mark: str = "") -> tuple[Path, Path]:
    """Return the paths of both files, with a mark before the endings of their names."""
    first, second = (folder / name.replace(".", f"{mark}.") for name in (NAME, MEAN_NAME))
    return first, second


def read_description(folder: Path, checkpoint: str = "") -> Description | None:
    """Return the description in a run's folder, or None if it has none.

    Args:
        folder: The run's folder.
        checkpoint: The name of the checkpoint whose training data is meant; '': of the run's latest data.

    Raises:
        UserError: A file is damaged; the message names it.
    """
    mark = mark_for(folder, NAME, checkpoint)
    path, mean_path = _paths(folder, mark)
    if not path.exists():
        return None
    cure = "Use a later checkpoint." if mark else f"Remove {NAME} to read the dataset itself."
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        names, resize, orientation = words["class_names"], words["resize"], words["orientation"]
        if not all(isinstance(name, str) for name in names) or resize not in RESIZES:
            raise ValueError("class_names or resize")
        if orientation not in ORIENTATIONS:
            raise ValueError("orientation")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: can't be used: {error}. {cure}") from error
    return Description(tuple(map(as_name, names)), _read_mean(mean_path, cure), resize, orientation)


def _read_mean(path: Path, cure: str) -> np.ndarray:
    try:
        mean = read_array(path)
    except UserError as error:
        raise UserError(f"{error}. {cure}") from error
    if mean.dtype != np.float32 or mean.ndim != 3 or mean.shape[2] > 4:
        raise UserError(f"{path}: is no mean image. {cure}")
    return mean


def check_same_classes(names: Sequence[str], data: str, description: Description, run: Path) -> None:
    """Raise UserError if a class has two names. A class without a name has its number instead.

    Two different numbers are names, such as those of class folders 0, 1, 2 and 1, 2, 3.

    Args:
        names: Of the classes in the dataset called `data`.
        data: The dataset's name, for messages.
        description: Of the training data of `run`.
        run: The run's folder.
    """
    for number, (now, then) in enumerate(zip(names, description.class_names, strict=False)):
        is_unnamed = str(number) in (now, then) and not (now.isdecimal() and then.isdecimal())
        if now != then and not is_unnamed:
            raise UserError(
                f"{data}: class {number} is {now!r}, and {then!r} in the training data of {run}. Give the "
                f"same classes in the same order, or, if both names mean the same, change {run / NAME}."
            )
