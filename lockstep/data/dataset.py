"""A dataset folder: batches of uint8 images, their labels and the mean image, checked before training starts.

train_hkl/0000.hkl ...  val_hkl/0000.hkl ...   uint8 (batch, row, column, channel)
labels/train_labels.npy  labels/val_labels.npy  one whole number per image, in the order of the files
misc/img_mean.npy                               float (row, column, channel)
manifest.json                                   what is in each file (optional)

Folders of theano_alexnet are read too: see lockstep/data/old_folders.py.
"""

import io
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data import hkl
from lockstep.data import old_folders as theano_alexnet
from lockstep.data.hkl import HklArray, Layout
from lockstep.data.manifest import Manifest, check_files, check_sums, read_manifest
from lockstep.errors import UserError

_LARGEST_IMAGE = 300_000_000  # bytes: what preprocessing takes at most (preprocessing/pictures.py)


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
    manifest: Manifest | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Words for people, one for each class; numbers where the folder has none."""
        return self.manifest.class_names if self.manifest else tuple(map(str, range(self.n_classes)))

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.files[0].row_shape


def open_dataset(config: Config) -> Dataset:
    """Reads every file's header and all labels. Raises UserError naming the file that doesn't fit."""
    folder = Path(config.data_folder)
    given = (config.train_folder, config.val_folder, config.label_folder, config.mean_file)
    if None in given and not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such dataset folder (data_folder; preprocessing/make_hkl.py makes one)"
        )
    manifest = _manifest_of(config, folder)
    label_folder = Path(config.label_folder or folder / "labels")
    layout = manifest.layout if manifest else None
    train = _open_half(
        "train", _folder_of("train", config.train_folder, folder, manifest), label_folder, layout
    )
    val = _open_half("val", _folder_of("val", config.val_folder, folder, manifest), label_folder, layout)
    n_classes = config.n_classes or _count_classes(folder, manifest, label_folder, train)
    for name, split in (("train", train), ("val", val)):
        _check_labels(label_folder / f"{name}_labels.npy", split.labels, n_classes)
    shape = train.files[0].row_shape
    for file in train.files + val.files:
        if file.row_shape != shape:
            raise UserError(f"{file.path}: images are {file.row_shape}, not {shape} as in the others")
    if manifest:
        check_files(manifest.train, train.files, train.labels)
        check_files(manifest.val, val.files, val.labels)
    return Dataset(train, val, _mean_of(config, folder, shape), n_classes, manifest)


def subtracting(dataset: Dataset, mean: tuple[float, ...] | None) -> Dataset:
    """The dataset with a mean of R, G and B for its own; with None the dataset as it is."""
    if mean is None:
        return dataset
    return replace(dataset, mean=_plain_mean(mean, dataset.image_shape))


def check_content(dataset: Dataset) -> None:
    """Compares every file with its checksum. Raises UserError naming one that differs."""
    if dataset.manifest is None:
        raise UserError("check_sums: this dataset folder has no manifest.json with checksums")
    check_sums(dataset.manifest)


def _manifest_of(config: Config, folder: Path) -> Manifest | None:
    """The manifest in data_folder, unless the configuration names batches that are elsewhere."""
    manifest = read_manifest(folder)
    for split, given in (("train", config.train_folder), ("val", config.val_folder)):
        if manifest and given and Path(given).resolve() != manifest.folder_of(split).resolve():
            return None
    return manifest


def _folder_of(split: str, given: str | None, folder: Path, manifest: Manifest | None) -> Path:
    if given:
        return Path(given)
    if manifest:
        return manifest.folder_of(split)
    own = folder / f"{split}_hkl"
    return own if own.is_dir() else theano_alexnet.find_folder(folder, split) or own


def _open_half(split: str, folder: Path, label_folder: Path, layout: Layout | None) -> Split:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder of .hkl batches (data_folder in the config)")
    files = tuple(hkl.inspect(path) for path in sorted(folder.glob("*.hkl"), key=theano_alexnet.place))
    if not files:
        raise UserError(f"{folder}: holds no .hkl files")
    old = layout == "c01b" if layout else theano_alexnet.is_c01b(files[0])
    if old:
        files = tuple(hkl.as_c01b(file) if len(file.shape) == 4 else file for file in files)
    for file in files:
        _check_images(file)
    labels = _find_labels(label_folder, split, files)
    n_images = sum(file.shape[0] for file in files)
    if len(labels) > n_images and old:
        labels = labels[:n_images]  # theano_alexnet writes whole batches only, and the labels of all
    if len(labels) != n_images:
        path = label_folder / f"{split}_labels.npy"
        raise UserError(f"{path}: holds {len(labels)} labels for the {n_images} images in {folder}")
    return Split(files, labels)


def _find_labels(folder: Path, split: str, files: tuple[HklArray, ...]) -> np.ndarray:
    """<split>_labels.npy, or put together from theano_alexnet's halves or quarters."""
    whole = folder / f"{split}_labels.npy"
    n_rows = files[0].shape[0]
    for suffixes in (theano_alexnet.SUFFIXES[2], theano_alexnet.SUFFIXES[4]):
        paths = [folder / f"{split}_labels{suffix}.npy" for suffix in suffixes]
        if whole.exists() or not all(path.exists() for path in paths):
            continue
        parts = [_read_labels(path) for path in paths]
        if any(len(part) != len(parts[0]) or len(part) % n_rows for part in parts):
            raise UserError(f"{paths[0]}: and its like hold no whole number of files' labels ({n_rows} each)")
        return theano_alexnet.join_labels(parts, n_rows)
    return _read_labels(whole)


def _count_classes(folder: Path, manifest: Manifest | None, label_folder: Path, train: Split) -> int:
    if manifest:
        return len(manifest.classes)
    if train.files[0].layout == "c01b":  # theano_alexnet's, which had labels for all of ImageNet's classes
        path = label_folder / "train_labels.npy"
        labels = _read_labels(path) if path.exists() else train.labels
        return int(labels.max()) + 1
    raise UserError(
        f"{folder}: has no manifest.json to say how many classes there are: set n_classes, "
        "or, if this is a folder of pictures, make a dataset of it with preprocessing/make_hkl.py"
    )


def _check_images(file: HklArray) -> None:
    if file.dtype != np.uint8 or len(file.shape) != 4 or 0 in file.shape:
        raise UserError(
            f"{file.path}: holds {file.dtype} of shape {file.shape}, "
            "not uint8 images as (batch, row, column, 3)"
        )
    if math.prod(file.row_shape) > _LARGEST_IMAGE:  # such a claim takes few bytes in a compressed file
        raise UserError(f"{file.path}: claims images of {file.row_shape}, more than {_LARGEST_IMAGE:,} bytes")
    if file.shape[3] != 3:
        hint = "; it looks like theano_alexnet's, the others do not" if file.shape[0] == 3 else ""
        raise UserError(f"{file.path}: shape {file.shape} is not (batch, row, column, 3){hint}")


def read_array(path: Path) -> np.ndarray:
    """One .npy file. Raises UserError naming it where it is not whole, or needs unpickling."""
    try:
        content = path.read_bytes()  # NumPy would take an error of the disk for the end of the file
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # whatever NumPy meets in a file that is something else
        raise UserError(f"{path}: is not a whole .npy file of numbers or names: {error}") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path}: is not a .npy file of one array")
    return array


def _read_labels(path: Path) -> np.ndarray:
    labels = read_array(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: holds {labels.dtype} of shape {labels.shape}, not one whole number a image")
    return labels.astype(np.int64)


def _check_labels(path: Path, labels: np.ndarray, n_classes: int) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(wrong):
        raise UserError(
            f"{path}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0 to {n_classes - 1} "
            f"({n_classes} classes)"
        )


def _mean_of(config: Config, folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    """What `subtract_mean` says; the mean image where it leaves that to the network."""
    if isinstance(config.subtract_mean, tuple):
        return _plain_mean(config.subtract_mean, shape)
    if config.subtract_mean == "none":
        return _plain_mean((0.0, 0.0, 0.0), shape)
    mean = _read_mean(Path(config.mean_file or folder / "misc" / "img_mean.npy"), shape)
    if config.subtract_mean == "channel":
        return _plain_mean(mean.mean((0, 1), np.float64), shape)
    return mean


def _plain_mean(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, np.float64), shape).astype(np.float32)


def _read_mean(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    mean = read_array(path)
    if mean.shape != shape and mean.shape == (shape[2], *shape[:2]):
        mean = mean.transpose(1, 2, 0)  # theano_alexnet's (channel, row, column)
    if mean.shape != shape:
        raise UserError(f"{path}: the mean image is {mean.shape}, the images are {shape}")
    if mean.dtype.kind not in "uif" or not (np.abs(mean) <= 255).all():
        raise UserError(f"{path}: the mean image holds values that are not pixels' (0 to 255)")
    return np.ascontiguousarray(mean, dtype=np.float32)
