"""Turns folders of pictures into a dataset folder to train from.

    python preprocessing/make_hkl.py data/digits_jpeg data/digits --size 36
    python preprocessing/make_hkl.py /scratch/imagenet data/imagenet

SOURCE holds train/<class>/*.JPEG and val/<class>/*.JPEG (or .jpg, .jpeg, .png, .webp). Classes are numbered
in the order of their sorted names, as theano_alexnet and Caffe do. Pictures are squashed to --size x --size,
which should be a little more than what the network takes. Training pictures are shuffled once, with the seed.
The dataset folder gets

    train_hkl/0000.hkl ...  val_hkl/...       uint8 (batch, row, column, channel), RGB
    labels/train_labels.npy, val_labels.npy   int64, in the order of the pictures in the files
    misc/img_mean.npy                         float32 (row, column, channel), of the training pictures
    manifest.json                             classes, and each file's checksum, pictures and labels

Everything is written beside the target and renamed at the end: a dataset folder is whole or not there.
"""

import argparse
import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from lockstep import batches
from lockstep.dataset import MANIFEST_VERSION
from lockstep.errors import UserError
from lockstep.randomness import Purpose, generator

ENDINGS = {".jpeg", ".jpg", ".png", ".webp"}


@dataclass(frozen=True)
class Picture:
    """A picture file and the number of its class."""

    path: Path
    label: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the folder with train/ and val/")
    parser.add_argument("target", type=Path, help="the dataset folder to make; must not be there yet")
    parser.add_argument("--size", type=int, default=256, help="rows and columns of the images (256)")
    parser.add_argument("--batch", type=int, default=256, help="images per file (256)")
    parser.add_argument("--seed", type=int, default=0, help="of the training pictures' order (0)")
    words = parser.parse_args()
    try:
        make_dataset(words.source, words.target, words.size, words.batch, words.seed)
    except (UserError, OSError) as error:
        print(f"make_hkl: {error}", file=sys.stderr)
        return 2
    return 0


def make_dataset(source: Path, target: Path, size: int, batch: int, seed: int) -> None:
    """Makes the dataset folder `target`. Raises UserError naming the folder or picture that can't be used."""
    if size < 1 or batch < 1 or seed < 0:
        raise UserError("--size and --batch must be at least 1, --seed at least 0")
    if target.exists():
        raise UserError(f"{target}: is there already; remove it, or name another target")
    classes = find_classes(source / "train")
    train = find_pictures(source / "train", classes)
    val = find_pictures(source / "val", classes)
    order = generator(seed, 0, Purpose.ORDER).permutation(len(train))
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        write_folder(source, unfinished, classes, [train[i] for i in order], val, size, batch)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{len(train)} training and {len(val)} validation images of {len(classes)} classes in {target}")


def write_folder(
    source: Path,
    target: Path,
    classes: list[str],
    train: list[Picture],
    val: list[Picture],
    size: int,
    batch: int,
) -> None:
    """Writes all files of a dataset folder into `target`, which is not there yet."""
    for folder in ("train_hkl", "val_hkl", "labels", "misc"):
        (target / folder).mkdir(parents=True)
    total = np.zeros((size, size, 3), np.float64)
    manifest = {
        "version": MANIFEST_VERSION,
        "classes": classes,
        "size": size,
        "train": write_split(source, target, "train", train, size, batch, total),
        "val": write_split(source, target, "val", val, size, batch),
    }
    np.save(target / "misc" / "img_mean.npy", (total / len(train)).astype(np.float32))
    (target / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def find_classes(folder: Path) -> list[str]:
    """The sorted names of the class folders. Raises UserError where there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder of class folders")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise UserError(f"{folder}: holds no class folders")
    return classes


def find_pictures(folder: Path, classes: list[str]) -> list[Picture]:
    """Every picture under <folder>/<class>/, sorted. Raises UserError for a class that train/ lacks."""
    unknown = sorted(set(find_classes(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: train/ has no such class")
    pictures = [
        Picture(path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("*"))
        if path.suffix.lower() in ENDINGS
    ]
    if not pictures:
        raise UserError(f"{folder}: holds no pictures ({', '.join(sorted(ENDINGS))})")
    return pictures


def write_split(
    source: Path,
    target: Path,
    split: str,
    pictures: list[Picture],
    size: int,
    batch: int,
    total: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Writes one half's files and labels, adds its images to `total`; returns its part of the manifest."""
    entries = []
    with tqdm(total=len(pictures), desc=split, unit="image", disable=None) as bar:
        for first in range(0, len(pictures), batch):
            part = pictures[first : first + batch]
            images = np.stack([read_picture(picture.path, size) for picture in part])
            name = f"{split}_hkl/{first // batch:04d}.hkl"
            batches.write(target / name, images)
            if total is not None:
                total += images.sum(0, dtype=np.float64)
            entries.append(
                {
                    "file": name,
                    "sha256": hashlib.sha256((target / name).read_bytes()).hexdigest(),
                    "images": [str(picture.path.relative_to(source)) for picture in part],
                    "labels": [picture.label for picture in part],
                }
            )
            bar.update(len(part))
    labels = np.array([picture.label for picture in pictures], np.int64)
    np.save(target / "labels" / f"{split}_labels.npy", labels)
    return entries


def read_picture(path: Path, size: int) -> np.ndarray:
    """One picture, squashed to size x size: uint8 (row, column, channel), RGB. Raises UserError naming it."""
    try:
        with Image.open(path) as picture:
            resized = picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: is not a picture that can be read: {error}") from error
    return np.asarray(resized)


if __name__ == "__main__":
    sys.exit(main())
