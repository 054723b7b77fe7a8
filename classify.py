"""Classify images with a trained network: print the five most probable classes of each.

    python classify.py photo.jpg                       with the newest run in runs/
    python classify.py *.jpg --run runs/try1 --epoch best
    python classify.py photos 'more/*.png' --out answers.csv      folders and patterns; or answers.json

With `task: multilabel` it prints all classes of a probability of at least --threshold instead.

Images are rotated and made square as the run's dataset was; the network sees the centre crop. The dataset
itself is not needed, because the run's folder has its classes, mean and geometry. The program runs on the
CPU. Exit code: 0 success; 2 an argument or image can't be used. The other images are classified all the same.
"""

import argparse
import dataclasses
import glob
import os
import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.config.layers import DATASET_PATHS
from lockstep.config.tasks import is_multilabel
from lockstep.data.augment import Augmenter
from lockstep.data.dataset import open_dataset
from lockstep.data.description import Description
from lockstep.data.items import pixels_of, resized
from lockstep.errors import UserError
from lockstep.evaluate.answers import Answer, as_json, as_lines, check_target, write_answers
from lockstep.files import refusing_unusable_paths
from lockstep.launch.console import show
from lockstep.loading import Batch
from lockstep.memory.host import HostMemory
from lockstep.network.low_precision import configure
from lockstep.network.replica import Replica, open_trained
from lockstep.programs import make_parser
from lockstep.runs import checkpoint_files
from lockstep.runs import folder as runfolder
from lockstep.runs.dataset_description import read_description
from lockstep.text import handle_closed_pipe, one_line
from preprocessing import folders
from preprocessing.images import BadImage, Geometry, open_by_pillow, to_image
from preprocessing.listing import LeftOut, summary_of
from validate import open_checkpoint

N_ANSWERS = 5
DATA_KEYS = {*DATASET_PATHS, "n_classes", "subtract_mean"}


def main() -> int:
    """Run the program and return its exit code."""
    try:
        arguments = parse_arguments()
        if arguments.out:
            check_target(arguments.out)
        folder = arguments.run or runfolder.newest(arguments.runs)
        overrides = ["devices=[cpu]", *arguments.override]
        config, checkpoint = open_checkpoint(folder, arguments.epoch, overrides)
        dataset = describe_dataset(folder, config, arguments.override, checkpoint.path.stem)
        config = dataclasses.replace(config, batch_size=1)
        configure(config)
        threshold = threshold_of(config, arguments.threshold)
        replica, dataset = open_trained(config, dataset, HostMemory(), checkpoint.path)
        source = f"{checkpoint.path}, epoch {checkpoint.state.epoch}"
        show(source, "stderr" if arguments.json else "stdout")  # standard output has JSON only
        answers, code = classify_all(find_images(arguments.images), replica, dataset, arguments, threshold)
        if arguments.out:
            write_answers(arguments.out, answers)
            show(f"wrote {arguments.out}: {len(answers):,} images", "stdout")
        return code
    except UserError as error:
        show(f"lockstep: {error}", "stderr")
        return 2


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, globals().get("COMMAND"))
    images = "a file: JPEG, PNG, WebP ...; a folder, with its sub-folders; or a pattern, such as '*.jpg'"
    parser.add_argument("images", nargs="+", metavar="IMAGE", help=images)
    parser.add_argument("--run", type=Path, help="a run's folder (default: the newest in --runs)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs (runs)")
    checkpoint_files.add_epoch(parser)
    threshold = "task: multilabel: least probability of a class that is printed (the run's `threshold`, 0.5)"
    parser.add_argument("--threshold", type=float, metavar="P", help=threshold)
    parser.add_argument("--json", action="store_true", help="print one JSON record for each image")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write a new .csv or .json file, print nothing"
    )
    parser.add_argument(
        "--override", nargs="*", default=[], metavar="key=value", help="override the run's configuration"
    )
    return parser.parse_args()


def threshold_of(config: Config, given: float | None) -> float | None:
    """Return the least probability of the classes to print; None: the most probable ones are printed.

    Raises:
        UserError: It is given for a network of one class per image, or is not from 0 to 1.
    """
    if not is_multilabel(config):
        if given is not None:
            raise UserError("--threshold: is for task: multilabel, and this run has one class per image")
        return None
    threshold = config.threshold if given is None else given
    if not 0 <= threshold <= 1:
        raise UserError(f"--threshold: {threshold:g} is not from 0 to 1")
    return threshold


def find_images(places: list[str]) -> list[Path]:
    """Return the files that the command line names: files, images in folders, and matches of patterns.

    Raises:
        UserError: A folder holds no images, or a pattern matches nothing.
    """
    found: list[Path] = []
    for place in places:
        paths = [Path(place)]
        if glob.has_magic(place) and not os.path.exists(place):
            paths = [Path(match) for match in sorted(glob.glob(place, recursive=True))]
            if not paths:
                raise UserError(f"{place}: matches no file. Give a file, a folder or another pattern.")
        for path in paths:
            found += images_in(path) if os.path.isdir(path) else [path]  # classify_all names unusable ones
    return list(dict.fromkeys(found))


def images_in(folder: Path) -> list[Path]:
    """Return the images in a folder and its sub-folders. Raise UserError if there are none."""
    left_out: list[LeftOut] = []
    paths = [folder / name for name in folders.find_images(folder, left_out)]
    for line in summary_of(left_out):
        show(f"note: {line}", "stderr")
    if not paths:
        raise UserError(f"{folder}: holds no images that Pillow reads. Give a folder of images.")
    return paths


def classify_all(
    paths: list[Path],
    replica: Replica,
    dataset: Description,
    arguments: argparse.Namespace,
    threshold: float | None = None,
) -> tuple[dict[str, list[Answer]], int]:
    """Classify images, and print the answers unless they go to a file.

    Returns:
        The answers by path, and the exit code: 2 if an image can't be used.
    """
    answers: dict[str, list[Answer]] = {}
    code = 0
    for path in paths:
        try:
            answers[str(path)] = classify(path, replica, dataset, threshold)
        except (OSError, BadImage, UserError) as error:
            reason = getattr(error, "strerror", None) or error
            show(f"lockstep: {one_line(str(path))}: can't be used: {reason}", "stderr")
            code = 2
            continue
        if not arguments.out:
            as_text = as_json if arguments.json else as_lines
            show(as_text(path, answers[str(path)]), "stdout")
    return answers, code


@refusing_unusable_paths()
def describe_dataset(folder: Path, config: Config, overrides: list[str], checkpoint: str) -> Description:
    """Return the dataset's description in the run's folder, or that of the dataset if `overrides` name one.

    Args:
        folder: The run's folder.
        config: The run's configuration.
        overrides: Settings as key=value.
        checkpoint: The name of the checkpoint that is used.

    Raises:
        UserError: Neither can be used.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    saved = None if overridden & DATA_KEYS else read_description(folder, checkpoint)
    return saved or open_dataset(config).description


def classify(
    path: Path, replica: Replica, dataset: Description, threshold: float | None = None
) -> list[Answer]:
    """Return the most probable classes of one image, or those of at least a probability, best first.

    Raises:
        OSError: The file can't be read.
        BadImage: The file is no usable image.
        UserError: Likewise, where images are not square or have other channels than three.
    """
    image = read_image(path, dataset)
    probabilities = replica.log_probabilities(batch_of_one(image, replica, dataset))[0].exp()
    n_answers = min(N_ANSWERS, len(probabilities))
    if threshold is not None:
        n_answers = int((probabilities >= threshold).sum())
    best = probabilities.topk(n_answers)
    names = [dataset.class_names[label] for label in best.indices.tolist()]
    return [Answer(name, share) for name, share in zip(names, best.values.tolist(), strict=True)]


def read_image(path: Path, dataset: Description) -> np.ndarray:
    """Return an image as the dataset's images are: uint8, shape (row, column, channel).

    Raises:
        OSError: The file can't be read.
        BadImage: The file is no usable image.
        UserError: Likewise, where images are not square or have other channels than three.
    """
    if path.exists() and not path.is_file():  # reading a pipe may wait for ever, and /dev/zero has no end
        raise BadImage("it is not a regular file")
    rows, columns, n_channels = dataset.image_shape
    if rows != columns or n_channels != 3:
        with open_by_pillow(path.read_bytes(), path.name) as opened:
            return resized(pixels_of(opened, n_channels, path.name), rows, columns)
    geometry = Geometry(dataset.image_shape[0], dataset.resize, dataset.orientation)
    return to_image(path.read_bytes(), geometry, path.name)


def batch_of_one(image: np.ndarray, replica: Replica, dataset: Description) -> Batch:
    """Return the centre crop of an image, minus the mean, as a batch of one."""
    size = replica.crop_size
    corner = [(whole - crop) // 2 for whole, crop in zip(dataset.image_shape, size, strict=False)]
    out = np.empty((1, *size, dataset.image_shape[2]), np.float32)
    Augmenter(dataset.mean, size).apply(image[None], np.array([[*corner, 0]]), out)
    zero = torch.zeros(1, dtype=torch.int64)
    images = torch.from_numpy(out).permute(0, 3, 1, 2)
    return Batch(Order("val", 1, 1, 0, 1, 0, 1), images, zero, zero)


if __name__ == "__main__":
    handle_closed_pipe()
    sys.exit(main())
