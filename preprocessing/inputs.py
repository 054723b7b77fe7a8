"""Where the pictures and labels are: from a folder, paths.yaml and the command line to a listing.

The keys of paths.yaml are theano_alexnet's; each can be given on the command line, which wins.
"""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.config import read_yaml
from lockstep.errors import UserError
from preprocessing import caffe_lists, devkit, folders, tars
from preprocessing.listing import Listing, Picture, require_pictures

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
    val_img_dir: str | None = _path("folder of class folders or of pictures, or the validation tar")
    meta_clsloc_mat: str | None = _path("meta_clsloc.mat, meta.mat, or the devkit's .tar.gz")
    val_label_file: str | None = _path("validation ground truth, or the devkit's .tar.gz")
    traintxt_filename: str | None = _path("Caffe-style list of training pictures, used if both are there")
    valtxt_filename: str | None = _path("Caffe-style list of validation pictures")
    tar_root_dir: str | None = _path("the dataset folder to make")
    tar_train_dir: str | None = _path("theano_alexnet's; can only be TAR_ROOT_DIR/train_hkl")
    tar_val_dir: str | None = _path("theano_alexnet's; can only be TAR_ROOT_DIR/val_hkl")
    misc_dir: str | None = _path("theano_alexnet's; can only be TAR_ROOT_DIR/misc")


KEYS = tuple(key.name for key in fields(Paths))


def add_path_options(parser: argparse.ArgumentParser) -> None:
    """Options with the names of paths.yaml's keys, and --paths."""
    group = parser.add_argument_group(f"paths ({PATHS_YAML.name} explains them)")
    group.add_argument(
        "--paths", type=Path, help="a paths.yaml; default, without SOURCE: preprocessing/paths.yaml"
    )
    for key in fields(Paths):
        group.add_argument(f"--{key.name}", metavar="PATH", help=key.metadata["help"])


def read_paths(words: argparse.Namespace, source: Path | None, target: Path | None) -> Paths:
    """paths.yaml, then what is found in the folder `source`, then the options. Raises UserError."""
    values: dict[str, Any] = {}
    given = {key: getattr(words, key) for key in KEYS if getattr(words, key)}
    if words.paths or not (source or "train_img_dir" in given or "traintxt_filename" in given):
        values |= _read_file(words.paths or PATHS_YAML)
    if source:
        values |= _find(source)
    if target:
        values["tar_root_dir"] = str(target)
    paths = Paths(**{**values, **given})
    _check_inside(paths)
    return paths


def make_listing(paths: Paths) -> Listing:
    """All pictures with their labels. Raises UserError naming what is missing or doesn't fit."""
    kit = devkit.read_meta(Path(paths.meta_clsloc_mat)) if paths.meta_clsloc_mat else None
    lists = [Path(name) for name in (paths.traintxt_filename, paths.valtxt_filename) if name]
    train, val = _required(paths, "train_img_dir"), _required(paths, "val_img_dir")
    if len(lists) == 2 and all(path.exists() for path in lists):
        listing = caffe_lists.list_from_files(lists[0], train, lists[1], val)
    else:
        classes, pictures = _list_train(train)
        listing = Listing(classes, classes, pictures, _list_val(val, classes, kit, paths))
    if kit:
        names = [kit.words.get(name, name) for name in listing.classes]
        listing = Listing(listing.classes, names, listing.train, listing.val)
    return listing


def _list_train(train: Path) -> tuple[list[str], list[Picture]]:
    if train.is_file():
        return tars.list_train_tar(train)
    if train.is_dir() and not folders.has_class_folders(train):
        inner = sorted(train.glob("*.tar"))
        if inner:
            return tars.list_class_tars(train, inner)
    classes = folders.find_classes(train)
    return classes, folders.list_class_folders(train, classes)


def _list_val(val: Path, classes: list[str], kit: devkit.Devkit | None, paths: Paths) -> list[Picture]:
    if not val.is_file() and folders.has_class_folders(val):
        return folders.list_class_folders(val, classes)
    if val.is_file():
        flat = tars.list_flat_tar(val)
    else:
        names = folders.find_pictures(val)
        flat = require_pictures([Picture(name, -1, f"{val}/{name}") for name in names], val)
    if kit is None:
        raise UserError(
            f"{val}: holds pictures without class folders: their labels are in ImageNet's devkit: "
            "--meta_clsloc_mat (meta_clsloc.mat, meta.mat or the devkit's .tar.gz) and --val_label_file"
        )
    truth = devkit.read_ground_truth(Path(paths.val_label_file or paths.meta_clsloc_mat or ""))
    labels = devkit.label_flat([picture.name for picture in flat], kit, truth, classes, str(val))
    return [picture._replace(label=label) for picture, label in zip(flat, labels, strict=True)]


def _find(source: Path) -> dict[str, str]:
    """What a folder holds under the names that people keep ImageNet or their own pictures by."""
    if not source.is_dir():
        raise UserError(f"{source}: there is no such folder of pictures")
    found = {}
    for split in ("train", "val"):
        names = (split, f"{_TAR_STEM}{split}", f"{_TAR_STEM}{split}.tar")
        places = [source / name for name in names if (source / name).exists()]
        found[f"{split}_img_dir"] = str(places[0] if places else source / split)
        if (source / f"{split}.txt").exists():
            found[f"{split}txt_filename"] = str(source / f"{split}.txt")
            if not places:
                found[f"{split}_img_dir"] = str(source)
    for key, patterns in (("meta_clsloc_mat", _KITS), ("val_label_file", _TRUTHS)):
        matches = [path for pattern in patterns for path in sorted(source.glob(pattern))]
        if matches:
            found[key] = str(matches[0])
    return found


def _read_file(path: Path) -> dict[str, Any]:
    layer = read_yaml(path)
    for key, value in layer.values.items():
        if key not in KEYS:
            raise UserError(f"{path}: unknown key '{key}' (there are: {', '.join(KEYS)})")
        if value is not None and not isinstance(value, str):
            raise UserError(f"{path}: {key} must be a path, not {value!r}")
    return dict(layer.values)


def _check_inside(paths: Paths) -> None:
    """theano_alexnet could put these anywhere, and never did."""
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
