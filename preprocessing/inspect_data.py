"""Check a dataset folder, and draw some of its images with their labels.

    python preprocessing/inspect_data.py data/imagenet
    python preprocessing/inspect_data.py data/digits --images 48 --crop 32 --seed 1
    python preprocessing/inspect_data.py data/digits --augmented --crop 32 crop=padded auto_augment=rand

The script compares every file with its checksum in manifest.json, and names each that differs. It writes into
FOLDER/inspect (or --out)

    contact_sheet.png   random images as stored, and as the network sees them after crop, mirror and mean
                        (gray is zero), with the class and the source image's name
    labels.png          the number of images per class
    mean.png            the mean image

With --augmented it reads no other files and writes only

    augmented.png       eight training images as stored, and under eight draws of the augmentation that the
                        keys (or --config FILE) set; keys are those of docs/augmentation.md

Folders of theano_alexnet can be inspected too.

Exit code: 0: every file is correct. 1: a file is not. 2: an argument can't be used.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from lockstep.config import Layer, read_yaml, resolve
from lockstep.config import read_command_line as read_config_keys
from lockstep.data import hkl
from lockstep.data.augment import Augmenter
from lockstep.data.dataset import Dataset, Split, open_dataset
from lockstep.data.hkl import HklArray
from lockstep.data.manifest import differing, read_manifest
from lockstep.errors import UserError
from lockstep.programs import make_parser, reports_errors
from lockstep.report.augmented import draw_sheet as draw_augmented_sheet
from lockstep.report.augmented import in_colors
from lockstep.text import handle_closed_pipe
from preprocessing.bars import progress_bar
from preprocessing.caffe_lists import read_names
from preprocessing.contact_sheet import Sample, draw_histogram, draw_sheet
from preprocessing.finish import IMAGE_LISTS

_COLUMNS = 4


@reports_errors("inspect_data", OSError)
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    words = read_command_line(arguments)
    keys = {
        "data_folder": str(words.folder),
        **({"n_classes": words.n_classes} if words.n_classes else {}),
    }
    manifest = read_manifest(words.folder)
    keys |= {"task": manifest.task} if manifest else {}
    if words.augmented:
        draw_augmented(words, keys)
        return 0
    if words.keys or words.config:
        raise UserError("keys and --config are for --augmented, which is missing. --n_classes is for both.")
    dataset = open_dataset(resolve([Layer("command line", keys)])[0])
    describe(dataset)
    draw(dataset, words)
    wrong = check(dataset)
    for text in wrong:
        print(f"inspect_data: {text}", file=sys.stderr)
    return 1 if wrong else 0


def read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `arguments` replaces it."""
    parser = make_parser(__doc__, globals().get("COMMAND"))
    parser.add_argument("folder", type=Path, help="the dataset folder")
    parser.add_argument("--out", type=Path, help="where to write the images (FOLDER/inspect)")
    parser.add_argument(
        "--images", type=int, default=24, help="on the sheet, half of them of validation (24)"
    )
    parser.add_argument(
        "--crop", type=int, help="what the network takes, in pixels (8/9 of the size: 227 of 256)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which images, crops and mirrors (0)")
    parser.add_argument("--n_classes", type=int, help="for a folder that does not say how many there are")
    parser.add_argument(
        "--augmented", action="store_true", help="only draw augmented training images: augmented.png"
    )
    parser.add_argument("--config", type=Path, help="for --augmented: a file of keys, such as config.yaml")
    parser.add_argument(
        "keys", nargs="*", metavar="key=value", help="for --augmented: keys, such as crop=padded"
    )
    return parser.parse_intermixed_args(arguments)


def describe(dataset: Dataset) -> None:
    """Print the facts in the headers and labels."""
    height, width, _ = dataset.image_shape
    for name, split in (("training", dataset.train), ("validation", dataset.val)):
        counts = count_by_class(dataset, split)
        print(
            f"{len(split):,} {name} images of {width} x {height} in {len(split.files):,} files, "
            f"{split.files[0].layout}; {counts.min():,} to {counts.max():,} of each of "
            f"{dataset.n_classes:,} classes"
        )
    channels = ", ".join(f"{value:.2f}" for value in dataset.mean.mean((0, 1)))
    what = "red, green, blue" if dataset.image_shape[2] == 3 else "each channel"
    print(f"mean of {what}: {channels}")


def count_by_class(dataset: Dataset, split: Split) -> np.ndarray:
    """Return the number of images of each class, int64 (class,)."""
    if split.labels.ndim == 2:
        counts: np.ndarray = split.labels.sum(0, dtype=np.int64)
        return counts
    return np.bincount(split.labels, minlength=dataset.n_classes)


def title_of(key: str, label: np.ndarray, names: tuple[str, ...]) -> str:
    """Return the half and the class of an image, or the names of all its classes."""
    if label.ndim:
        return f"{key}: {', '.join(names[number] for number in np.flatnonzero(label)) or 'no class'}"
    return f"{key} {label}: {names[int(label)]}"


def draw(dataset: Dataset, words: argparse.Namespace) -> None:
    """Write the three images."""
    out = words.out or words.folder / "inspect"
    crop = words.crop or max(1, min(dataset.image_shape[:2]) * 8 // 9)
    if not 1 <= crop <= min(dataset.image_shape[:2]) or words.images < 2 or words.seed < 0:
        raise UserError("--crop must fit into the images, --images be at least 2, --seed at least 0")
    names = dataset.class_names
    samples = [
        sample
        for key, split in (("train", dataset.train), ("val", dataset.val))
        for sample in take_samples(dataset, key, split, names, crop, words)
    ]
    counts = {
        "training": count_by_class(dataset, dataset.train),
        "validation": count_by_class(dataset, dataset.val),
    }
    out.mkdir(parents=True, exist_ok=True)
    draw_sheet(samples, _COLUMNS).save(out / "contact_sheet.png")
    draw_histogram(counts, names).save(out / "labels.png")
    Image.fromarray(in_colors(np.rint(dataset.mean).astype(np.uint8))).save(out / "mean.png")
    print(f"look at {out}/contact_sheet.png, labels.png and mean.png")


def draw_augmented(words: argparse.Namespace, keys: dict[str, Any]) -> None:
    """Write augmented.png: training images under the augmentation of a configuration."""
    layers = [read_yaml(words.config)] if words.config else []
    config, _ = resolve([*layers, Layer("command line", keys), read_config_keys(words.keys)])
    dataset = open_dataset(config)
    shortest = min(dataset.image_shape[:2])
    given = words.crop or config.input_size or (shortest if config.crop == "padded" else shortest * 8 // 9)
    rows, columns = (given, given) if isinstance(given, int) else given
    if not (1 <= rows <= dataset.image_shape[0] and 1 <= columns <= dataset.image_shape[1]):
        stored = " x ".join(map(str, dataset.image_shape[:2]))
        given_size = f"{rows} x {columns}"
        raise UserError(
            f"--crop: {given_size} does not fit into images of {stored} pixels. "
            f"Set --crop to a number from 1 to {shortest}."
        )
    out = words.out or words.folder / "inspect"
    out.mkdir(parents=True, exist_ok=True)
    draw_augmented_sheet(config, dataset, (rows, columns)).save(out / "augmented.png")
    print(f"look at {out}/augmented.png")


def take_samples(
    dataset: Dataset, key: str, split: Split, names: tuple[str, ...], crop: int, words: argparse.Namespace
) -> list[Sample]:
    """Return random images of one half: training images with random crops and mirrors, others centered."""
    random = np.random.default_rng([words.seed, len(split)])
    chosen = np.sort(random.choice(len(split), min(len(split), words.images // 2), replace=False))
    augmenter = Augmenter(dataset.mean, (crop, crop))
    margins = [side - crop for side in dataset.image_shape[:2]]
    sources = source_names(words.folder, key, split)
    samples = []
    for index in chosen.tolist():
        stored = split.image(index)
        corner = [random.integers(margin + 1) if key == "train" else margin // 2 for margin in margins]
        mirror = key == "train" and random.integers(2)
        seen = np.empty((1, crop, crop, stored.shape[2]), np.float32)
        augmenter.apply(stored[None], np.array([[*corner, int(mirror)]]), seen)
        title = title_of(key, np.asarray(split.labels[index]), names)
        samples.append(Sample(stored, seen[0], title, sources[index] if sources else ""))
    return samples


def source_names(folder: Path, key: str, split: Split) -> list[str]:
    """Return the names of the source images if the folder has them."""
    path = folder / IMAGE_LISTS[key]
    names = read_names(path) if path.exists() else []
    return names if len(names) == len(split) else []


def check(dataset: Dataset) -> list[str]:
    """Read every file, and return a line for each that is wrong."""
    files = dataset.train.files + dataset.val.files
    sums = dataset.manifest.checksums() if dataset.manifest else {}
    n_files = len(sums) or len(files)
    with progress_bar(n_files, "file") as bar:
        if dataset.manifest and len(sums) >= len(files):
            folder = dataset.manifest.path.parent
            wrong = differing(folder, sums, lambda name: bar.update())
            problems = [f"{folder / name}: its checksum is not the manifest's" for name in wrong]
            done = "checksums of all files are compared"
        else:
            problems = [text for file in files if (text := read_through(file, bar))]
            done = "all batches are read; there are no checksums to compare"
    print(f"{done}: {n_files - len(problems):,} good, {len(problems):,} bad")
    return problems


def read_through(file: HklArray, bar: "tqdm[Any]") -> str:
    """Return the problem with a file, or ''."""
    bar.update()
    try:
        hkl.read_rows(file, 0, np.empty(file.shape, np.uint8))
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    handle_closed_pipe()
    sys.exit(main())
