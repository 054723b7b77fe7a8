"""Make a dataset folder from images.

    python preprocessing/make_hkl.py data/digits_jpeg data/digits --size 36
    python preprocessing/make_hkl.py my_images data/mine --resize crop --val-split 0.2
    python preprocessing/make_hkl.py /data/imagenet data/imagenet      folders or the original tars
    python preprocessing/make_hkl.py toy /data/imagenet data/toy       10 batches of each, to try things out
    python preprocessing/make_hkl.py                                   as preprocessing/paths.yaml says
    python preprocessing/make_hkl.py --train_img_dir T --val_img_dir V --traintxt_filename train.txt \\
        --valtxt_filename val.txt --tar_root_dir data/mine             Caffe's lists

SOURCE is a folder with
    train/<class>/... and val/<class>/... (or valid, validation, test), with images in any format of Pillow's,
        in sub-folders too, or
    <class>/..., of which --val-split becomes the validation images, or
    labels.csv or labels.parquet with the columns path and label, and the images, likewise split; with
        --task multilabel, a label is any number of names separated by ';', or there is a column of 0 and 1
        for each class, or
    train/<wnid>/*.JPEG, val/*.JPEG and ImageNet's devkit (unpacked or not), or
    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz, which are not unpacked,
    or Caffe's train.txt and val.txt, with the images in train/ and val/, or at the paths of the lists.

TARGET becomes the dataset folder (docs/data.md describes it). It is made beside TARGET and renamed at the
end, so it is either complete or missing. After an interruption the same command resumes, with the same
result. Classes are numbered in the order of their sorted names, as in theano_alexnet and Caffe.

Exit code: 0: the dataset is complete. 2: an argument or an image can't be used. 130: Ctrl-C.
"""

import argparse
import os
import sys
from pathlib import Path

from lockstep.config.tasks import MONITORED
from lockstep.data.manifest import ORIENTATIONS, RESIZES
from lockstep.errors import UserError, first_line
from lockstep.programs import make_parser, reports_errors
from lockstep.text import escape_when_printing, handle_closed_pipe
from preprocessing.build import Job, build, unfinished
from preprocessing.finish import BAD_LIST, task_fact
from preprocessing.images import Geometry
from preprocessing.inputs import VAL_SPLIT, add_path_options, is_plain, list_images, read_paths
from preprocessing.listing import LEFT_OUT_LIST, Listing, summary_of
from preprocessing.plan import Settings, make_tasks
from preprocessing.tasks import OnError, Target


@reports_errors("make_hkl", OSError, interrupted="stopped as asked; the same command resumes")
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    escape_when_printing()
    words = read_command_line(arguments)
    try:
        mode, source, target = split_words(words.words)
        paths = read_paths(words, source, target)
        own_images = source is not None and is_plain(paths, source)
        settings = read_settings(words, mode == "toy", own_images)
        folder = Path(paths.tar_root_dir or "")
        if folder.exists():
            raise UserError(f"{folder}: exists already. Remove it, or name another target.")
        listing = list_images(paths, source, words.val_split, words.task)
        make_dataset(listing, folder, settings, words.workers, words.max_errors)
    except MemoryError as error:
        text = f"not enough memory: {first_line(error)}. Lower --size, --batch or --workers."
        raise UserError(text) from error
    return 0


def read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `arguments` replaces it."""
    parser = make_parser(__doc__, globals().get("COMMAND"))
    add = parser.add_argument
    words = "toy: 10 batches of each half; the images; the folder to make (what paths.yaml says)"
    add("words", nargs="*", metavar="[toy|full] [SOURCE TARGET]", help=words)
    add("--size", type=int, default=256, help="rows and columns of the images (256)")
    resize = (
        "squash: all of the image, as theano_alexnet (the default); crop: short side to --size, then the "
        "middle, as Caffe; pad: long side to --size, then black"
    )
    add("--resize", choices=RESIZES, default="squash", help=resize)
    orientation = "apply: turn images as the camera noted (EXIF; the default); ignore, as theano_alexnet"
    add("--orientation", choices=ORIENTATIONS, default="apply", help=orientation)
    add("--batch", type=int, default=256, help="images in a file (256)")
    add("--seed", type=int, default=0, help="seed of the training images' order (0)")
    layout = "c01b: files, folders and labels for theano_alexnet's own code, as hickle 2 wrote them"
    add("--layout", choices=["b01c", "c01b"], default="b01c", help=layout)
    add("--split", default="1", help="c01b: files that a batch is divided into: 1, 2 or 4 (1)")
    on_error = (
        "at a bad image: stop; skip: leave it out; replace: take the next of its class (own images: skip; "
        f"ImageNet, lists and c01b: stop). {BAD_LIST} lists them"
    )
    add("--on-error", choices=["stop", "skip", "replace"], help=on_error)
    add("--max-errors", type=int, default=100, help="end it at more bad images than this (100)")
    split = f"own images without validation images: the share to validate on ({VAL_SPLIT})"
    add("--val-split", type=float, default=VAL_SPLIT, help=split)
    task = "multilabel: images have any number of classes, as labels.csv says (docs/multilabel.md)"
    add("--task", choices=list(MONITORED), default="classify", help=task)
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (one a core)")
    add_path_options(parser)
    return parser.parse_intermixed_args(arguments)


def split_words(words: list[str]) -> tuple[str, Path | None, Path | None]:
    """Return ("toy" or "full", SOURCE, TARGET)."""
    mode = words.pop(0) if words and words[0] in ("toy", "full") else "full"
    if not words:
        return mode, None, None
    if len(words) != 2:
        raise UserError(f"give SOURCE and TARGET, or neither: {' '.join(words)}")
    return mode, Path(words[0]), Path(words[1])


def read_settings(words: argparse.Namespace, toy: bool, own_images: bool) -> Settings:
    """Return the checked options. Raise UserError for values that can't work."""
    geometry = Geometry(words.size, words.resize, words.orientation)
    if words.split not in ("1", "2", "4"):
        raise UserError(
            f"--split: {words.split} is not 1, 2 or 4, the number of files that --layout c01b divides a "
            "batch into. --val-split is the share of images to validate on."
        )
    if not 0 < words.val_split < 1:
        raise UserError(f"--val-split: {words.val_split:g} is not between 0 and 1")
    parts = int(words.split)
    usual: OnError = "skip" if own_images and words.layout == "b01c" else "stop"
    on_error = words.on_error or usual
    settings = Settings(geometry, words.batch, words.seed, words.layout, parts, on_error, toy)
    settings.check()
    if words.workers < 1 or words.max_errors < 0:
        raise UserError("--workers must be at least 1, --max-errors at least 0")
    return settings


def make_dataset(listing: Listing, folder: Path, settings: Settings, n_workers: int, max_errors: int) -> None:
    """Make a dataset folder. Raise UserError for a file that can't be used."""
    print(
        f"{len(listing.train):,} training and {len(listing.val):,} validation images of "
        f"{len(listing.classes):,} classes",
        flush=True,
    )
    for line in summary_of(listing.left_out):
        print(line, flush=True)
    target = Target(
        unfinished(folder), settings.geometry.size, settings.batch, settings.layout, settings.parts
    )
    chosen = {
        "resize": settings.geometry.resize,
        "orientation": settings.geometry.orientation,
        "seed": settings.seed,
        **({"on_error": settings.on_error} if settings.on_error != "stop" else {}),
        **task_fact(listing),
    }
    tasks, names = make_tasks(listing, settings), listing.class_names
    origin = " and ".join(
        os.path.realpath(os.path.dirname(images[0].path)) for images in (listing.train, listing.val)
    )
    job = Job(folder, target, tasks, listing.classes, names, chosen, listing.left_out, origin=origin)
    done = build(job, n_workers, max_errors)
    print(
        f"{done.n_train:,} training and {done.n_val:,} validation images of "
        f"{len(listing.classes):,} classes in {folder}"
    )
    if done.n_bad:
        print(f"{done.n_bad:,} bad images are listed in {folder / BAD_LIST}")
    if listing.left_out:
        print(f"{len(listing.left_out):,} files that were left out are listed in {folder / LEFT_OUT_LIST}")


if __name__ == "__main__":
    handle_closed_pipe()
    sys.exit(main())
