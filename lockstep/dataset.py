"""A dataset folder: batches of uint8 images, their labels and the mean image, checked before training starts.

train_hkl/0000.hkl ...  val_hkl/0000.hkl ...   uint8 (batch, row, column, channel)
labels/train_labels.npy  labels/val_labels.npy  one whole number per image, in the order of the files
misc/img_mean.npy                               float (row, column, channel)
manifest.json                                   what is in each file (optional)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import batches
from lockstep.batches import HklArray
from lockstep.config import Config
from lockstep.errors import UserError

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Split:
    """The training or the validation half: its files, and one label (int64) per image."""

    files: tuple[HklArray, ...]
    labels: np.ndarray

    @property
    def file_rows(self) -> tuple[int, ...]:
        return tuple(file.shape[0] for file in self.files)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Everything that trainers and loaders need to know of the data. `mean`: float32 (row, column, 3)."""

    train: Split
    val: Split
    mean: np.ndarray
    n_classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.files[0].row_shape


def open_dataset(config: Config) -> Dataset:
    """Reads every file's header and all labels. Raises UserError naming the file that doesn't fit."""
    folder = Path(config.data_folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such dataset folder (data_folder; preprocessing/make_hkl.py makes one)"
        )
    manifest = _read_manifest(folder / "manifest.json")
    n_classes = config.n_classes or (len(manifest["classes"]) if manifest else None)
    if n_classes is None:
        raise UserError(
            f"{folder}: has no manifest.json to say how many classes there are: set n_classes, "
            "or, if this is a folder of pictures, make a dataset of it with preprocessing/make_hkl.py"
        )
    labels = Path(config.label_folder or folder / "labels")
    train = _open_split(
        Path(config.train_folder or folder / "train_hkl"), labels / "train_labels.npy", n_classes
    )
    val = _open_split(Path(config.val_folder or folder / "val_hkl"), labels / "val_labels.npy", n_classes)
    shape = train.files[0].row_shape
    for file in train.files + val.files:
        if file.row_shape != shape:
            raise UserError(f"{file.path}: images are {file.row_shape}, not {shape} as in the others")
    if manifest:
        _check_manifest(folder, manifest, train, val)
    mean = _read_mean(Path(config.mean_file or folder / "misc" / "img_mean.npy"), shape)
    return Dataset(train, val, mean, n_classes)


def _open_split(folder: Path, label_file: Path, n_classes: int) -> Split:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder of .hkl batches (data_folder in the config)")
    files = tuple(batches.inspect(path) for path in sorted(folder.glob("*.hkl")))
    if not files:
        raise UserError(f"{folder}: holds no .hkl files")
    for file in files:
        _check_images(file)
    labels = _read_labels(label_file, n_classes)
    n_images = sum(file.shape[0] for file in files)
    if len(labels) != n_images:
        raise UserError(f"{label_file}: holds {len(labels)} labels for the {n_images} images in {folder}")
    return Split(files, labels)


def _check_images(file: HklArray) -> None:
    if file.dtype != np.uint8 or len(file.shape) != 4 or 0 in file.shape:
        raise UserError(
            f"{file.path}: holds {file.dtype} of shape {file.shape}, "
            "not uint8 images as (batch, row, column, 3)"
        )
    if file.shape[3] != 3:
        hint = "; it looks like theano_alexnet's (channel, row, column, batch)" if file.shape[0] == 3 else ""
        raise UserError(f"{file.path}: shape {file.shape} is not (batch, row, column, 3){hint}")


def _read_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except Exception as error:  # whatever NumPy meets in a file that is something else
        raise UserError(f"{path}: is not a whole .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path}: is not a .npy file of one array")
    return array


def _read_labels(path: Path, n_classes: int) -> np.ndarray:
    labels = _read_array(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: holds {labels.dtype} of shape {labels.shape}, not one whole number a image")
    wrong = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(wrong):
        raise UserError(
            f"{path}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0 to {n_classes - 1} "
            f"({n_classes} classes)"
        )
    return labels.astype(np.int64)


def _read_mean(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    mean = _read_array(path)
    if mean.shape != shape:
        raise UserError(f"{path}: the mean image is {mean.shape}, the images are {shape}")
    if mean.dtype.kind not in "uif" or not (np.abs(mean) <= 255).all():
        raise UserError(f"{path}: the mean image holds values that are not pixels' (0 to 255)")
    return np.ascontiguousarray(mean, dtype=np.float32)


def _read_manifest(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    if not _is_manifest(manifest):
        raise UserError(
            f"{path}: is not a manifest of version {MANIFEST_VERSION}; make the dataset folder again"
        )
    return dict(manifest)


def _is_manifest(manifest: Any) -> bool:
    if not isinstance(manifest, dict) or manifest.get("version") != MANIFEST_VERSION:
        return False
    classes, halves = manifest.get("classes"), (manifest.get("train"), manifest.get("val"))
    return isinstance(classes, list) and len(classes) > 0 and all(_is_half(half) for half in halves)


def _is_half(half: Any) -> bool:
    return isinstance(half, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("file"), str)
        and isinstance(entry.get("labels"), list)
        for entry in half
    )


def _check_manifest(folder: Path, manifest: dict[str, Any], train: Split, val: Split) -> None:
    """Sizes and labels file by file. Checksums are there too; checking them would mean reading everything."""
    for name, split in (("train", train), ("val", val)):
        first = 0
        entries = manifest[name]
        if len(entries) != len(split.files):
            raise UserError(f"{folder}: {len(split.files)} {name} files, the manifest has {len(entries)}")
        for entry, file in zip(entries, split.files, strict=True):
            n_rows = file.shape[0]
            if Path(entry["file"]).name != Path(file.path).name or len(entry["labels"]) != n_rows:
                raise UserError(
                    f"{file.path}: holds {n_rows} images, the manifest has "
                    f"{len(entry['labels'])} in {entry['file']}"
                )
            if not np.array_equal(entry["labels"], split.labels[first : first + n_rows]):
                raise UserError(f"{file.path}: its labels are not those of the manifest")
            first += n_rows
