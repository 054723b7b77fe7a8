"""Convert a dataset folder of theano_alexnet to the present layout.

    python preprocessing/convert.py /scratch/ilsvrc12 data/imagenet
    python preprocessing/convert.py /scratch/ilsvrc12 data/imagenet --meta_clsloc_mat meta_clsloc.mat

Such a folder also trains without conversion (docs/data.md). A converted folder has checksums and names. Rows
are read without the rest of their file, which makes `shuffle: blocks` fast. Sub-batches (_0, _1) are joined.
Labels, the mean image and the names in misc/ are copied. Like make_hkl.py the script is parallel and
resumable.

Exit code: 0: the new folder is complete. 2: an argument or a file can't be used. 130: Ctrl-C.
"""

import argparse
import os
import sys
from pathlib import Path

from lockstep.config import Layer, resolve
from lockstep.data.dataset import Dataset, Split, open_dataset
from lockstep.errors import UserError
from lockstep.programs import make_parser, reports_errors
from preprocessing import devkit
from preprocessing.build import Job, build, unfinished
from preprocessing.caffe_lists import class_folders, read_list
from preprocessing.make_labels import read_order
from preprocessing.tasks import StoredBatch, Target, Task

_KEYS = ("train_folder", "val_folder", "label_folder", "mean_file")


@reports_errors("convert", OSError, interrupted="stopped as asked; the same command resumes")
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    convert(read_command_line(arguments))
    return 0


def read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `arguments` replaces it."""
    parser = make_parser(__doc__)
    parser.add_argument("old", type=Path, help="the folder that holds train_hkl_b256_b_256, labels, misc ...")
    parser.add_argument("new", type=Path, help="the dataset folder to make; must not be there yet")
    parser.add_argument("--batch", type=int, default=256, help="images in a file (256)")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (one a core)"
    )
    parser.add_argument(
        "--meta_clsloc_mat", type=Path, help="meta_clsloc.mat or meta.mat, for the classes' names"
    )
    for key in _KEYS:
        parser.add_argument(f"--{key}", help="where it is not in OLD, as in the configuration")
    return parser.parse_args(arguments)


def convert(options: argparse.Namespace) -> None:
    """Make options.new from options.old. Raise UserError for a file that does not fit."""
    if options.batch < 1 or options.workers < 1:
        raise UserError("--batch and --workers must be at least 1")
    given = {key: getattr(options, key) for key in _KEYS if getattr(options, key)}
    layer = Layer("command line", {"data_folder": str(options.old), **given})
    dataset = open_dataset(resolve([layer])[0])
    size, width, _ = dataset.image_shape
    if size != width:
        raise UserError(f"{options.old}: its images are {size} x {width}, not square")
    tasks = [
        task
        for split, half in (("train", dataset.train), ("val", dataset.val))
        for task in make_tasks(split, half, find_names(options.old, split, half), options.batch)
    ]
    classes = find_classes(options.old, dataset)
    old = dataset.manifest
    names = list(old.class_names) if old else classes
    if options.meta_clsloc_mat:
        kit = devkit.read_meta(options.meta_clsloc_mat)
        names = [kit.words.get(name, name) for name in classes]
    kept = {"resize": old.resize, "orientation": old.orientation} if old else {}
    target = Target(unfinished(options.new), size, options.batch, "b01c", 1)
    origin = os.path.realpath(options.old)
    job = Job(options.new, target, tasks, classes, names, kept, origin=origin)
    done = build(job, options.workers, 0)
    print(f"{done.n_train:,} training and {done.n_val:,} validation images in {options.new}")


def make_tasks(split: str, half: Split, names: list[str], batch: int) -> list[Task]:
    """Return tasks of `batch` images each, in the order of the old files."""
    tasks = []
    for number, start in enumerate(range(0, len(half), batch)):
        stop = min(start + batch, len(half))
        runs, first = [], 0
        for file in half.files:
            begin, end = max(start, first), min(stop, first + file.shape[0])
            if begin < end:
                runs.append((file, begin - first, end - begin))
            first += file.shape[0]
        labels = tuple(half.labels[start:stop].tolist())
        tasks.append(Task(split, number, StoredBatch(tuple(runs), tuple(names[start:stop]), labels)))
    return tasks


def find_names(folder: Path, split: str, half: Split) -> list[str]:
    """Return <class>/<file> of each image if the folder has it, else the old file and the row."""
    lists = folder / "misc"
    try:
        names = read_order(folder, lists, split)
    except UserError:
        return [f"{Path(file.path).name}:{row}" for file in half.files for row in range(file.shape[0])]
    if len(names) < len(half):
        raise UserError(f"{lists}: has {len(names)} names of the {len(half)} {split} images")
    return ["/".join(Path(name).parts[-2:]) for name in names[: len(half)]]


def find_classes(folder: Path, dataset: Dataset) -> list[str]:
    """Return the wnids of misc/train.txt, or the labels if it is missing."""
    if dataset.manifest:
        return list(dataset.manifest.classes)
    path = folder / "misc" / "train.txt"
    return class_folders(read_list(path) if path.exists() else [], dataset.n_classes)


if __name__ == "__main__":
    sys.exit(main())
