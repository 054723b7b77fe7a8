"""The facts about a dataset that users of a trained network need: dataset.json and dataset_mean.npy.

They are in a run's folder, so that `classify.py` works without the dataset. If a run is resumed on another
dataset, the facts about the one before are kept for its checkpoints, with its digest in the files' names.
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
    """The facts about a dataset.

    Attributes:
        mean: The mean to subtract, float32 (row, column, channel).
        resize: How images became square.
        digest: Of the dataset; '' if it has none, or if the facts were written before digests were.
    """

    class_names: tuple[str, ...]
    mean: np.ndarray
    resize: Resize
    orientation: Orientation
    digest: str = ""

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.mean.shape


def write_description(folder: Path, description: Description) -> None:
    """Write both files, and keep those of another dataset. Raise UserError if that fails."""
    known = read_description(folder)
    if known and known.digest != description.digest:
        kept = _paths(folder, known.digest)
        if not kept[0].exists():  # after a kill, `known` may have the mean of the other dataset
            _write(known, *kept)
    _write(description, *_paths(folder))


def _write(description: Description, path: Path, mean_path: Path) -> None:
    keys = ("class_names", "resize", "orientation", "digest")
    write_array(mean_path, description.mean)
    write_text(path, json.dumps({key: getattr(description, key) for key in keys}, indent=0))


def _paths(folder: Path, digest: str = "") -> tuple[Path, Path]:
    """Return the paths of both files: those of the run's latest dataset, or kept ones with a digest."""
    mark = f"-{digest[:12]}" if digest.isalnum() else ""  # a digest of a file is no path
    names = (Path(name) for name in (NAME, MEAN_NAME))
    first, second = (folder / f"{name.stem}{mark}{name.suffix}" for name in names)
    return first, second


def read_description(folder: Path, digest: str = "") -> Description | None:
    """Return the description in a run's folder, or None if it has none.

    Args:
        folder: The run's folder.
        digest: Of the dataset that a checkpoint was trained on. Without a kept description of it, and by
            default, the description is that of the run's latest dataset.

    Raises:
        UserError: A file is damaged; the message names it.
    """
    path, mean_path = _paths(folder, digest)
    if not path.exists():
        path, mean_path = _paths(folder)
    if not path.exists():
        return None
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        names, resize, orientation = words["class_names"], words["resize"], words["orientation"]
        own = str(words.get("digest", ""))
        if not all(isinstance(name, str) for name in names) or resize not in RESIZES:
            raise ValueError("class_names or resize")
        if orientation not in ORIENTATIONS:
            raise ValueError("orientation")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: can't be used: {error}. Remove it to read the dataset itself.") from error
    return Description(tuple(map(as_name, names)), _read_mean(mean_path), resize, orientation, own)


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
