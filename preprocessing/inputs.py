"""The sources of images and labels: from a folder, paths.yaml and the command line to a listing.

The keys of paths.yaml are theano_alexnet's. Options of the command line override them.
"""

import argparse
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lockstep.config import Config, read_yaml
from lockstep.config.tasks import Task
from lockstep.errors import UserError
from preprocessing import caffe_lists, devkit, folders, layouts, tars
from preprocessing.listing import LeftOut, Listing, SourceImage, require_images

VAL_SPLIT = Config().val_split
PATHS_YAML = Path(__file__).parent / "paths.yaml"
_TAR_STEM = "ILSVRC2012_img_"
_KITS = ("ILSVRC2012_devkit_t12.tar.gz", "*devkit*/data/meta*.mat", "*devkit*/*/meta*.mat", "meta*.mat")
_TRUTHS = ("*devkit*/data/*validation_ground_truth.txt", "*validation_ground_truth.txt")


def _path(explained: str) -> Any:
    return field(default=None, metadata={"help": explained})


@dataclass(frozen=True)
class Paths:
    """The keys of paths.yaml."""

    train_img_dir: str | None = _path("folder of class folders or of classes' tars, or the training tar")
    val_img_dir: str | None = _path("folder of class folders or of images, or the validation tar")
    meta_clsloc_mat: str | None = _path("meta_clsloc.mat, meta.mat, or the devkit's .tar.gz")
    val_label_file: str | None = _path("validation ground truth, or the devkit's .tar.gz")
    traintxt_filename: str | None = _path("Caffe-style list of training images, used if both are there")
    valtxt_filename: str | None = _path("Caffe-style list of validation images")
    tar_root_dir: str | None = _path("the dataset folder to make")
    tar_train_dir: str | None = _path("theano_alexnet's; can only be TAR_ROOT_DIR/train_hkl")
    tar_val_dir: str | None = _path("theano_alexnet's; can only be TAR_ROOT_DIR/val_hkl")
    misc_dir: str | None = _path("theano_alexnet's; can only be TAR_ROOT_DIR/misc")


KEYS = tuple(key.name for key in fields(Paths))


def add_path_options(parser: argparse.ArgumentParser) -> None:
    """Add --paths, and an option for each key of paths.yaml."""
    group = parser.add_argument_group(f"paths ({PATHS_YAML.name} explains them)")
    group.add_argument(
        "--paths", type=Path, help="a paths.yaml; default, without SOURCE: preprocessing/paths.yaml"
    )
    for key in fields(Paths):
        group.add_argument(f"--{key.name}", metavar="PATH", help=key.metadata["help"])


def read_paths(options: argparse.Namespace, source: Path | None, target: Path | None) -> Paths:
    """Merge paths.yaml, the files of the folder `source`, and the options; a later one wins.

    Raises:
        UserError: A path is missing, unknown or outside of the dataset folder.
    """
    values: dict[str, Any] = {}
    from_options = {key: getattr(options, key) for key in KEYS if getattr(options, key)}
    if options.paths or not (
        source or "train_img_dir" in from_options or "traintxt_filename" in from_options
    ):
        values |= _read_file(options.paths or PATHS_YAML)
    if source:
        values |= _find(source)
    if target:
        values["tar_root_dir"] = str(target)
    paths = Paths(**{**values, **from_options})
    _check_inside(paths)
    return paths


def list_source(source: Path, val_split: float, task: Task = "classify") -> Listing:
    """Return the images of a folder with their labels: a user's own images, or ImageNet.

    Args:
        source: The folder.
        val_split: The share of images to validate on, where the folder does not say which.
        task: Whether an image has one class, or any number of them.

    Raises:
        UserError: The folder can't be used.
    """
    return list_images(Paths(**_find(source)), source, val_split, task)


def list_images(paths: Paths, source: Path | None, val_split: float, task: Task = "classify") -> Listing:
    """Return the images of `source` as `list_source`, or those at `paths` if they say more than `source`."""
    if source and is_plain(paths, source):
        return layouts.list_folder(source, val_split, task)
    if task != "classify":
        raise UserError(
            f"{source or paths.traintxt_filename}: has one class for each image: task: {task} needs a "
            "folder with labels.csv or labels.parquet"
        )
    return make_listing(paths)


def is_plain(paths: Paths, source: Path) -> bool:
    """Return whether a folder has none of ImageNet's tars, devkits and lists."""
    train, val = source / "train", source / "val"
    plain = replace(paths, tar_root_dir=None) == Paths(train_img_dir=str(train), val_img_dir=str(val))
    return plain and next(train.glob("*.tar"), None) is None


def make_listing(paths: Paths) -> Listing:
    """Return all images with their labels. Raise UserError for a file that is missing or does not fit."""
    kit = devkit.read_meta(Path(paths.meta_clsloc_mat)) if paths.meta_clsloc_mat else None
    lists = [Path(name) for name in (paths.traintxt_filename, paths.valtxt_filename) if name]
    train, val = _required(paths, "train_img_dir"), _required(paths, "val_img_dir")
    if len(lists) == 2 and all(path.exists() for path in lists):
        listing = caffe_lists.list_from_files(lists[0], train, lists[1], val)
    else:
        left_out: list[LeftOut] = []
        classes, images = _list_train(train, left_out)
        others = _list_val(val, classes, kit, paths, left_out)
        listing = Listing(classes, classes, images, others, tuple(left_out))
    if kit:
        names = [kit.words.get(name, name) for name in listing.classes]
        listing = replace(listing, class_names=names)
    return listing


def _list_train(train: Path, left_out: list[LeftOut]) -> tuple[list[str], list[SourceImage]]:
    if train.is_file():
        return tars.list_train_tar(train, left_out)
    if train.is_dir() and not folders.class_names(train):
        inner = sorted(train.glob("*.tar"))
        if inner:
            return tars.list_class_tars(train, inner, left_out)
    classes = folders.find_classes(train)
    return classes, folders.list_class_folders(train, classes, left_out)


def _list_val(
    val: Path, classes: list[str], kit: devkit.Devkit | None, paths: Paths, left_out: list[LeftOut]
) -> list[SourceImage]:
    if not val.is_file() and folders.class_names(val):
        return folders.list_class_folders(val, classes, left_out)
    if val.is_file():
        flat = tars.list_flat_tar(val, left_out)
    else:
        names = folders.find_images(val, left_out)
        flat = require_images([SourceImage(name, -1, f"{val}/{name}") for name in names], val)
    if kit is None:
        raise UserError(
            f"{val}: holds images without class folders: their labels are in ImageNet's devkit: "
            "--meta_clsloc_mat (meta_clsloc.mat, meta.mat or the devkit's .tar.gz) and --val_label_file"
        )
    truth = devkit.read_ground_truth(Path(paths.val_label_file or paths.meta_clsloc_mat or ""))
    labels = devkit.label_flat([image.name for image in flat], kit, truth, classes, str(val))
    return [image._replace(label=label) for image, label in zip(flat, labels, strict=True)]


def _find(source: Path) -> dict[str, str]:
    """Return the paths in a folder that have the usual names of ImageNet or of class folders."""
    if not source.is_dir():
        raise UserError(f"{source}: there is no such folder of images")
    values = {}
    for split in ("train", "val"):
        names = (split, f"{_TAR_STEM}{split}", f"{_TAR_STEM}{split}.tar")
        places = [source / name for name in names if (source / name).exists()]
        values[f"{split}_img_dir"] = str(places[0] if places else source / split)
        if (source / f"{split}.txt").exists():
            values[f"{split}txt_filename"] = str(source / f"{split}.txt")
            if not places:
                values[f"{split}_img_dir"] = str(source)
    for key, patterns in (("meta_clsloc_mat", _KITS), ("val_label_file", _TRUTHS)):
        matches = [path for pattern in patterns for path in sorted(source.glob(pattern))]
        if matches:
            values[key] = str(matches[0])
    return values


def _read_file(path: Path) -> dict[str, Any]:
    layer = read_yaml(path)
    for key, value in layer.values.items():
        if key not in KEYS:
            raise UserError(f"{path}: unknown key '{key}' (there are: {', '.join(KEYS)})")
        if value is not None and not isinstance(value, str):
            raise UserError(f"{path}: {key} must be a path, not {value!r}")
    return dict(layer.values)


def _check_inside(paths: Paths) -> None:
    """Raise UserError for a folder outside of the dataset folder, which theano_alexnet permitted."""
    root = Path(_required(paths, "tar_root_dir")).absolute()
    for key, name in (("tar_train_dir", "train_hkl"), ("tar_val_dir", "val_hkl"), ("misc_dir", "misc")):
        value = getattr(paths, key)
        if value and Path(value).absolute() != root / name:
            raise UserError(f"{key}: {value} must be {root / name} (or left out): a dataset is one folder")


def _required(paths: Paths, key: str) -> Path:
    value = getattr(paths, key)
    if not value:
        raise UserError(
            f"{key}: is not given: in paths.yaml, as --{key}, or as SOURCE and TARGET (--help has examples)"
        )
    return Path(value)
