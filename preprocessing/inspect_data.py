"""Checks a dataset folder, and draws what is in it, to see that images match labels.

    python preprocessing/inspect_data.py data/imagenet
    python preprocessing/inspect_data.py data/digits --images 48 --crop 32 --seed 1

Reads every file, compares it with its checksum in manifest.json, and names each that differs. Writes into
FOLDER/inspect (or --out)

    contact_sheet.png   random images as stored, and as the network sees them after crop, mirror and mean
                        (mid-grey is zero), with the class and the source picture's name
    labels.png          how many images each class has
    mean.png            the mean image

Folders of theano_alexnet can be inspected too.

Exit code: 0 every file is as it should be; 1 one is not; 2 something given can't be used.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from lockstep.config import Layer, resolve
from lockstep.data import hkl
from lockstep.data.augment import Augmenter
from lockstep.data.dataset import Dataset, Split, open_dataset
from lockstep.data.hkl import HklArray
from lockstep.data.manifest import differing
from lockstep.errors import UserError
from preprocessing.bars import progress_bar
from preprocessing.caffe_lists import read_list
from preprocessing.contact_sheet import Sample, draw_histogram, draw_sheet
from preprocessing.finish import IMAGE_LISTS

_COLUMNS = 4


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. `arguments`: those of the command line, for the tests."""
    words = read_command_line(arguments)
    try:
        keys = {
            "data_folder": str(words.folder),
            **({"n_classes": words.n_classes} if words.n_classes else {}),
        }
        dataset = open_dataset(resolve([Layer("command line", keys)])[0])
        describe(dataset)
        draw(dataset, words)
        wrong = check(dataset)
    except (UserError, OSError) as error:
        print(f"inspect_data: {error}", file=sys.stderr)
        return 2
    for text in wrong:
        print(f"inspect_data: {text}", file=sys.stderr)
    return 1 if wrong else 0


def read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the dataset folder")
    parser.add_argument("--out", type=Path, help="where to write the pictures (FOLDER/inspect)")
    parser.add_argument(
        "--images", type=int, default=24, help="on the sheet, half of them of validation (24)"
    )
    parser.add_argument(
        "--crop", type=int, help="what the network takes, in pixels (8/9 of the size: 227 of 256)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which images, crops and mirrors (0)")
    parser.add_argument("--n_classes", type=int, help="for a folder that does not say how many there are")
    return parser.parse_args(arguments)


def describe(dataset: Dataset) -> None:
    """Prints what the headers and labels say."""
    height, width, _ = dataset.image_shape
    for name, split in (("training", dataset.train), ("validation", dataset.val)):
        counts = np.bincount(split.labels, minlength=dataset.n_classes)
        print(
            f"{len(split):,} {name} images of {width} x {height} in {len(split.files):,} files, "
            f"{split.files[0].layout}; {counts.min():,} to {counts.max():,} of each of "
            f"{dataset.n_classes:,} classes"
        )
    channels = ", ".join(f"{value:.2f}" for value in dataset.mean.mean((0, 1)))
    print(f"mean of red, green, blue: {channels}")


def draw(dataset: Dataset, words: argparse.Namespace) -> None:
    """Writes the three pictures."""
    out = words.out or words.folder / "inspect"
    crop = words.crop or dataset.image_shape[0] * 8 // 9
    if not 1 <= crop <= min(dataset.image_shape[:2]) or words.images < 2 or words.seed < 0:
        raise UserError("--crop must fit into the images, --images be at least 2, --seed at least 0")
    names = dataset.class_names
    samples = [
        sample
        for key, split in (("train", dataset.train), ("val", dataset.val))
        for sample in take_samples(dataset, key, split, names, crop, words)
    ]
    counts = {
        "training": np.bincount(dataset.train.labels, minlength=dataset.n_classes),
        "validation": np.bincount(dataset.val.labels, minlength=dataset.n_classes),
    }
    out.mkdir(parents=True, exist_ok=True)
    draw_sheet(samples, _COLUMNS).save(out / "contact_sheet.png")
    draw_histogram(counts, names).save(out / "labels.png")
    Image.fromarray(np.rint(dataset.mean).astype(np.uint8)).save(out / "mean.png")
    print(f"look at {out}/contact_sheet.png, labels.png and mean.png")


def take_samples(
    dataset: Dataset, key: str, split: Split, names: tuple[str, ...], crop: int, words: argparse.Namespace
) -> list[Sample]:
    """Random images of one half: training ones cropped and mirrored at random, others in the middle."""
    random = np.random.default_rng([words.seed, len(split)])
    chosen = np.sort(random.choice(len(split), min(len(split), words.images // 2), replace=False))
    augmenter = Augmenter(dataset.mean, crop)
    margins = [side - crop for side in dataset.image_shape[:2]]
    sources = source_names(words.folder, key, split)
    samples = []
    for index in chosen.tolist():
        stored = read_image(split, index)
        corner = [random.integers(margin + 1) if key == "train" else margin // 2 for margin in margins]
        mirror = key == "train" and random.integers(2)
        seen = np.empty((1, crop, crop, 3), np.float32)
        augmenter.apply(stored[None], np.array([[*corner, int(mirror)]]), seen)
        label = int(split.labels[index])
        title = f"{key} {label}: {names[label]}"
        samples.append(Sample(stored, seen[0], title, sources[index] if sources else ""))
    return samples


def read_image(split: Split, index: int) -> np.ndarray:
    """Image number `index` over all files: uint8 (row, column, 3)."""
    for file in split.files:
        if index < file.shape[0]:
            out = np.empty((1, *file.row_shape), np.uint8)
            hkl.read_rows(file, index, out)
            image: np.ndarray = out[0]
            return image
        index -= file.shape[0]
    raise AssertionError("an index beyond the last file")


def source_names(folder: Path, key: str, split: Split) -> list[str]:
    """The source pictures' names where the folder has them."""
    path = folder / IMAGE_LISTS[key]
    lines = read_list(path) if path.exists() else []
    return [name for name, _ in lines] if len(lines) == len(split) else []


def check(dataset: Dataset) -> list[str]:
    """Reads every file. Returns a line for each that is not as it should be."""
    files = dataset.train.files + dataset.val.files
    sums = dataset.manifest.checksums() if dataset.manifest else {}
    n_files = len(sums) or len(files)
    with progress_bar(n_files, "file") as bar:
        if dataset.manifest and len(sums) >= len(files):
            folder = dataset.manifest.path.parent
            wrong = differing(folder, sums, lambda name: bar.update())
            found = [f"{folder / name}: its checksum is not the manifest's" for name in wrong]
            done = "checksums of all files are compared"
        else:
            found = [text for file in files if (text := read_through(file, bar))]
            done = "all batches are read; there are no checksums to compare"
    print(f"{done}: {n_files - len(found):,} good, {len(found):,} bad")
    return found


def read_through(file: HklArray, bar: "tqdm[Any]") -> str:
    """What is wrong with a file, or nothing."""
    bar.update()
    try:
        hkl.read_rows(file, 0, np.empty(file.shape, np.uint8))
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
