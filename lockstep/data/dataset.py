"""A dataset folder: batches of uint8 images, their labels and the mean image, checked before training.

train_hkl/0000.hkl ...  val_hkl/0000.hkl ...   uint8 (batch, row, column, channel)
labels/train_labels.npy  labels/val_labels.npy  one integer per image, in the order of the files;
                                                with `task: multilabel` uint8 (n, class), 0 or 1
misc/img_mean.npy                               float (row, column, channel)
manifest.json                                   the contents of each file (optional)

Folders of theano_alexnet are read too: see lockstep/data/old_folders.py.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lockstep.config import Config
from lockstep.config.augmentation import makes_images
from lockstep.config.tasks import Task, is_multilabel
from lockstep.data import hkl
from lockstep.data import old_folders as theano_alexnet
from lockstep.data.description import Description
from lockstep.data.hkl import HklArray, Layout
from lockstep.data.items import ItemSplit
from lockstep.data.manifest import Manifest, check_files, check_sums, read_manifest
from lockstep.data.split import HklSplit
from lockstep.data.split import Split as Split
from lockstep.data.survey import Survey, current_survey
from lockstep.errors import UserError
from lockstep.files import read_array, refusing_unusable_paths
from lockstep.text import as_name

_LARGEST_IMAGE = 300_000_000  # bytes, the limit of preprocessing/images.py


@dataclass(frozen=True)
class Dataset:
    """All that trainers and loaders need of the data. `mean` is float32 (row, column, channel).

    Attributes:
        manifest: Of a dataset folder that has one.
        survey: Of Python objects with items.
        task: Whether an image has one class or any number of them.
    """

    train: Split
    val: Split
    mean: np.ndarray
    n_classes: int
    manifest: Manifest | None = None
    survey: Survey | None = None
    task: Task = "classify"

    @property
    def n_labels(self) -> int:
        """Numbers in the label of an image with any number of classes; 0: it has one class."""
        return self.n_classes if self.task == "multilabel" else 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class; its number if it has no name."""
        source = self.survey or self.manifest
        names = source.class_names[: self.n_classes] if source else ()
        return (*map(as_name, names), *map(str, range(len(names), self.n_classes)))

    @property
    def digest(self) -> str:
        """A digest that identifies the dataset: the manifest's or the survey's, or '' without both."""
        if self.survey:
            return self.survey.fingerprint
        return self.manifest.digest() if self.manifest else ""

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.image_shape

    @property
    def description(self) -> Description:
        """The facts that users of a trained network need."""
        names = self.class_names
        if self.survey:
            return Description(names, self.mean, "squash", "apply")
        if self.manifest is None:
            return Description(names, self.mean, "squash", "ignore")
        return Description(names, self.mean, self.manifest.resize, self.manifest.orientation)


Described = TypeVar("Described", Dataset, Description)


@refusing_unusable_paths()
def open_dataset(config: Config) -> Dataset:
    """Open the dataset of a configuration: a folder, reading all headers and labels, or Python objects.

    Raises:
        UserError: A file is missing or does not fit the others; the message names it.
    """
    if config.data is not None:
        return _open_objects(config)
    folder = Path(config.data_folder)
    paths = (config.train_folder, config.val_folder, config.label_folder, config.mean_file)
    if None in paths and not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such dataset folder. Set data_folder to a folder of images, or to a "
            "dataset that `lockstep convert` makes."
        )
    manifest = _manifest_of(config, folder)
    if manifest:
        _check_task(config, manifest)
    label_folder = Path(config.label_folder or folder / "labels")
    layout = manifest.layout if manifest else None
    train = _open_half(
        "train", _folder_of("train", config.train_folder, folder, manifest), label_folder, layout
    )
    val = _open_half("val", _folder_of("val", config.val_folder, folder, manifest), label_folder, layout)
    n_classes = config.n_classes or _count_classes(folder, manifest, label_folder, train)
    for name, split in (("train", train), ("val", val)):
        check = _check_label_vectors if is_multilabel(config) else _check_labels
        check(label_folder / f"{name}_labels.npy", split.labels, n_classes)
    shape = train.files[0].row_shape
    for file in train.files + val.files:
        if file.row_shape != shape:
            raise UserError(f"{file.path}: images are {file.row_shape}, not {shape} as in the others")
    if manifest:
        check_files(manifest.train, train.files, train.labels)
        check_files(manifest.val, val.files, val.labels)
    return Dataset(train, val, _mean_of(config, folder, shape), n_classes, manifest, task=config.task)


def _open_objects(config: Config) -> Dataset:
    survey = current_survey(config)
    given = config.subtract_mean if isinstance(config.subtract_mean, tuple) else survey.mean
    try:
        mean = _plain_mean(0.0 if config.subtract_mean == "none" else given, survey.image_shape)
        train, val = (
            ItemSplit(config, name, n_items, survey.image_shape, survey.n_classes)
            for name, n_items in (("train", survey.n_train), ("val", survey.n_val))
        )
    except MemoryError as error:
        rows, columns, _ = survey.image_shape
        raise UserError(
            f"data: too little memory for {survey.n_train:,} and {survey.n_val:,} images of {rows} x "
            f"{columns}: {error}. Lower item_size, or give shorter datasets."
        ) from error
    return Dataset(train, val, mean, survey.n_classes, survey=survey, task=config.task)


def _check_task(config: Config, manifest: Manifest) -> None:
    """Raise UserError if a dataset folder was made for another task."""
    if manifest.task != config.task:
        raise UserError(
            f"{manifest.path.parent}: was made with task: {manifest.task}, the configuration says "
            f"task: {config.task}. Set task={manifest.task}, or convert the images again."
        )


def with_mean(dataset: Described, mean: tuple[float, ...] | None) -> Described:
    """Return the dataset with one number for each channel as its mean. With None, return it unchanged."""
    if mean is None:
        return dataset
    return replace(dataset, mean=_plain_mean(mean, dataset.image_shape))


def takes_mean_of_data(config: Config) -> bool:
    """Return whether the mean is that of the data. Otherwise `subtract_mean` gives it."""
    return config.subtract_mean in (None, "image", "channel")


def as_subtracted(config: Config, mean: np.ndarray) -> np.ndarray:
    """Return a mean image as training subtracts it: whole, or the mean of each of its channels."""
    if config.subtract_mean == "channel" or makes_images(config):
        return _plain_mean(mean.mean((0, 1), np.float64), mean.shape)
    return mean


def check_content(dataset: Dataset) -> None:
    """Compare every file with its checksum. Raise UserError for the first one that differs."""
    if dataset.manifest is None:
        raise UserError("check_sums: this dataset folder has no manifest.json with checksums")
    check_sums(dataset.manifest)


def _manifest_of(config: Config, folder: Path) -> Manifest | None:
    """Return the manifest in data_folder, unless the configuration names batches in other folders."""
    manifest = read_manifest(folder)
    for split, given in (("train", config.train_folder), ("val", config.val_folder)):
        if manifest and given and Path(given).resolve() != manifest.folder_of(split).resolve():
            return None
    return manifest


def _folder_of(split: str, given: str | None, folder: Path, manifest: Manifest | None) -> Path:
    if given:
        if not Path(given).is_dir():
            raise UserError(f"{split}_folder: {given}: there is no such folder of .hkl batches")
        return Path(given)
    if manifest:
        return manifest.folder_of(split)
    own = folder / f"{split}_hkl"
    return own if own.is_dir() else theano_alexnet.find_folder(folder, split) or own


def _open_half(split: str, folder: Path, label_folder: Path, layout: Layout | None) -> HklSplit:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder of .hkl batches (data_folder in the config). If data_folder "
            "holds images, convert them (lockstep convert IMAGES FOLDER), and set data_folder to FOLDER."
        )
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
        labels = labels[:n_images]  # theano_alexnet writes only whole batches, but the labels of all images
    if len(labels) != n_images:
        path = label_folder / f"{split}_labels.npy"
        raise UserError(f"{path}: holds {len(labels)} labels for the {n_images} images in {folder}")
    return HklSplit(files, labels)


def _find_labels(folder: Path, split: str, files: tuple[HklArray, ...]) -> np.ndarray:
    """Return <split>_labels.npy, or the labels joined from theano_alexnet's halves or quarters."""
    whole = folder / f"{split}_labels.npy"
    n_rows = files[0].shape[0]
    for suffixes in (theano_alexnet.SUFFIXES[2], theano_alexnet.SUFFIXES[4]):
        paths = [folder / f"{split}_labels{suffix}.npy" for suffix in suffixes]
        if whole.exists() or not all(path.exists() for path in paths):
            continue
        parts = [_read_labels(path) for path in paths]
        if any(len(part) != len(parts[0]) or len(part) % n_rows for part in parts):
            raise UserError(f"{paths[0]}: this and the other parts do not hold {n_rows} labels for each file")
        return theano_alexnet.join_labels(parts, n_rows)
    return _read_labels(whole)


def _count_classes(folder: Path, manifest: Manifest | None, label_folder: Path, train: HklSplit) -> int:
    if manifest:
        return len(manifest.classes)
    if train.files[0].layout == "c01b":  # theano_alexnet's training labels have all of ImageNet's classes
        path = label_folder / "train_labels.npy"
        labels = _read_labels(path) if path.exists() else train.labels
        return int(labels.max()) + 1
    raise UserError(
        f"{folder}: has no manifest.json to say how many classes there are: set n_classes, "
        "or, if this is a folder of images, make a dataset of it with `lockstep convert`"
    )


def _check_images(file: HklArray) -> None:
    if file.dtype != np.uint8 or len(file.shape) != 4 or 0 in file.shape:
        raise UserError(
            f"{file.path}: holds {file.dtype} of shape {file.shape}, "
            "not uint8 images as (batch, row, column, channel)"
        )
    if math.prod(file.row_shape) > _LARGEST_IMAGE:  # a small compressed file may claim any size
        raise UserError(f"{file.path}: claims images of {file.row_shape}, more than {_LARGEST_IMAGE:,} bytes")
    if not 1 <= file.shape[3] <= 4:
        hint = "; it looks like theano_alexnet's, the others do not" if file.shape[0] == 3 else ""
        raise UserError(f"{file.path}: shape {file.shape} is not (batch, row, column, 1 to 4 channels){hint}")


def _read_labels(path: Path) -> np.ndarray:
    labels = read_array(path)
    if labels.ndim == 2 and labels.dtype == np.uint8:
        return labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: holds {labels.dtype} of shape {labels.shape}, not one integer per image")
    return labels.astype(np.int64)


def _check_label_vectors(path: Path, labels: np.ndarray, n_classes: int) -> None:
    if labels.ndim != 2 or labels.shape[1] != n_classes:
        raise UserError(
            f"{path}: holds {labels.dtype} of shape {labels.shape}, and task: multilabel needs uint8 of "
            f"shape (images, {n_classes}), 0 or 1 for each class"
        )
    wrong = np.argwhere(labels > 1)
    if len(wrong):
        row, column = wrong[0]
        raise UserError(f"{path}: label {labels[row, column]} of image {row}, class {column}, is not 0 or 1")


def _check_labels(path: Path, labels: np.ndarray, n_classes: int) -> None:
    if labels.ndim != 1:
        raise UserError(
            f"{path}: holds labels of shape {labels.shape}, which are of task: multilabel. Set it."
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(wrong):
        raise UserError(
            f"{path}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0 to {n_classes - 1} "
            f"({n_classes} classes)"
        )


def _mean_of(config: Config, folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return the mean that `subtract_mean` selects, or the mean image if the model decides."""
    if isinstance(config.subtract_mean, tuple):
        return _plain_mean(config.subtract_mean, shape)
    if config.subtract_mean == "none":
        return _plain_mean(0.0, shape)
    path = Path(config.mean_file or folder / "misc" / "img_mean.npy")
    return as_subtracted(config, _read_mean(path, shape))


def _plain_mean(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    if np.size(values) not in (1, shape[2]):
        text = f"has {np.size(values)} numbers, and the images have {shape[2]} channel(s)"
        raise UserError(f"subtract_mean: {text}. Give one number for each channel.")
    return np.broadcast_to(np.asarray(values, np.float64), shape).astype(np.float32)


def _read_mean(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    mean = read_array(path)
    if mean.shape != shape and mean.shape == (shape[2], *shape[:2]):
        mean = mean.transpose(1, 2, 0)  # theano_alexnet's (channel, row, column)
    if mean.shape != shape:
        raise UserError(f"{path}: the mean image is {mean.shape}, the images are {shape}")
    if mean.dtype.kind not in "uif" or not (np.abs(mean) <= 255).all():
        raise UserError(f"{path}: the mean image holds values outside of 0 to 255")
    return np.ascontiguousarray(mean, dtype=np.float32)
