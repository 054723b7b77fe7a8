"""The facts about a dataset that users of a trained network need: dataset.json and dataset_mean.npy.

They are in a run's folder, so that `classify.py` works without the dataset.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.manifest import ORIENTATIONS, RESIZES, Orientation, Resize
from lockstep.errors import UserError
from lockstep.files import read_array, write_array, write_text
from lockstep.text import as_name

NAME, MEAN_NAME = "dataset.json", "dataset_mean.npy"


@dataclass(frozen=True)
class Description:
    """Class names, the mean to subtract, float32 (row, column, channel), and how images became square."""

    class_names: tuple[str, ...]
    mean: np.ndarray
    resize: Resize
    orientation: Orientation

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.mean.shape


def write_description(folder: Path, description: Description) -> None:
    """Write both files. Raise UserError if that fails."""
    words = {key: getattr(description, key) for key in ("class_names", "resize", "orientation")}
    write_array(folder / MEAN_NAME, description.mean)
    write_text(folder / NAME, json.dumps(words, indent=0))


def read_description(folder: Path) -> Description | None:
    """Return the description in a run's folder, or None if it has none.

    Raises:
        UserError: A file is damaged; the message names it.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        names, resize, orientation = words["class_names"], words["resize"], words["orientation"]
        if not all(isinstance(name, str) for name in names) or resize not in RESIZES:
            raise ValueError("class_names or resize")
        if orientation not in ORIENTATIONS:
            raise ValueError("orientation")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: can't be used: {error}. Remove it to read the dataset itself.") from error
    return Description(tuple(map(as_name, names)), _read_mean(folder / MEAN_NAME), resize, orientation)


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


def _read_mean(path: Path) -> np.ndarray:
    try:
        mean = read_array(path)
    except UserError as error:
        raise UserError(f"{error}. Remove {NAME} to read the dataset itself.") from error
    if mean.dtype != np.float32 or mean.ndim != 3 or mean.shape[2] > 4:
        raise UserError(f"{path}: is no mean image. Remove {NAME} to read the dataset itself.")
    return mean
