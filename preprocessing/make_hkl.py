"""Turns pictures into a dataset folder to train from.

    python preprocessing/make_hkl.py data/digits_jpeg data/digits --size 36
    python preprocessing/make_hkl.py my_pictures data/mine --resize crop --on-error skip
    python preprocessing/make_hkl.py /data/imagenet data/imagenet      folders or the original tars
    python preprocessing/make_hkl.py toy /data/imagenet data/toy       10 batches of each, to try things out
    python preprocessing/make_hkl.py                                   as preprocessing/paths.yaml says
    python preprocessing/make_hkl.py --train_img_dir T --val_img_dir V --traintxt_filename train.txt \\
        --valtxt_filename val.txt --tar_root_dir data/mine             Caffe's lists

SOURCE is a folder with
    train/<class>/*.JPEG and val/<class>/*.JPEG (or .jpg, .jpeg, .png, .webp), or
    train/<wnid>/*.JPEG, val/*.JPEG and ImageNet's devkit (unpacked or not), or
    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz, which are not unpacked,
    or train.txt and val.txt as Caffe has them, with the pictures in train/ and val/, or where the lists say.

TARGET becomes the dataset folder (docs/data.md describes it). It is made beside TARGET and renamed at the
end, so it is whole or not there. Stopped or killed at any moment, the same command goes on, and the result is
the same. Classes are numbered in the order of their sorted names, as theano_alexnet and Caffe do.

Exit code: 0 the dataset is whole; 2 something given, or a picture, can't be used; 130 Ctrl-C.
"""

import argparse
import io
import os
import sys
from pathlib import Path

from lockstep.data.manifest import RESIZES
from lockstep.errors import UserError
from preprocessing.build import Job, build, unfinished
from preprocessing.finish import BAD_LIST
from preprocessing.inputs import Paths, add_path_options, make_listing, read_paths
from preprocessing.pictures import ORIENTATIONS, Geometry
from preprocessing.plan import Settings, make_tasks
from preprocessing.tasks import Target


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. `arguments`: those of the command line, for the tests."""
    for stream in (sys.stdout, sys.stderr):  # a file's name may be bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = read_command_line(arguments)
    try:
        mode, source, target = split_words(words.words)
        paths = read_paths(words, source, target)
        make_dataset(paths, read_settings(words, mode == "toy"), words.workers, words.max_errors)
    except (UserError, OSError) as error:
        print(f"make_hkl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("make_hkl: stopped as asked; the same command goes on", file=sys.stderr)
        return 130
    return 0


def read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    words = "toy: 10 batches of each half; the pictures; the folder to make (what paths.yaml says)"
    add("words", nargs="*", metavar="[toy|full] [SOURCE TARGET]", help=words)
    add("--size", type=int, default=256, help="rows and columns of the images (256)")
    resize = (
        "squash: all of the picture, as theano_alexnet (the default); crop: short side to --size, then the "
        "middle, as Caffe; pad: long side to --size, then black"
    )
    add("--resize", choices=RESIZES, default="squash", help=resize)
    orientation = "apply: turn pictures as the camera noted (EXIF); ignore, as theano_alexnet (the default)"
    add("--orientation", choices=ORIENTATIONS, default="ignore", help=orientation)
    add("--batch", type=int, default=256, help="images in a file (256)")
    add("--seed", type=int, default=0, help="seed of the training pictures' order (0)")
    layout = "c01b: files, folders and labels for theano_alexnet's own code, as hickle 2 wrote them"
    add("--layout", choices=["b01c", "c01b"], default="b01c", help=layout)
    add("--split", type=int, default=1, help="c01b: files that a batch is divided into: 1, 2 or 4 (1)")
    on_error = f"at a bad picture: stop; leave it out; take the next of its class. {BAD_LIST} lists them"
    add("--on-error", choices=["stop", "skip", "replace"], default="stop", help=on_error)
    add("--max-errors", type=int, default=100, help="end it at more bad pictures than this (100)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (one a core)")
    add_path_options(parser)
    return parser.parse_intermixed_args(arguments)


def split_words(words: list[str]) -> tuple[str, Path | None, Path | None]:
    """(toy or full, SOURCE, TARGET)"""
    mode = words.pop(0) if words and words[0] in ("toy", "full") else "full"
    if not words:
        return mode, None, None
    if len(words) != 2:
        raise UserError(f"give SOURCE and TARGET, or neither: {' '.join(words)}")
    return mode, Path(words[0]), Path(words[1])


def read_settings(words: argparse.Namespace, toy: bool) -> Settings:
    geometry = Geometry(words.size, words.resize, words.orientation)
    settings = Settings(geometry, words.batch, words.seed, words.layout, words.split, words.on_error, toy)
    settings.check()
    if words.workers < 1 or words.max_errors < 0:
        raise UserError("--workers must be at least 1, --max-errors at least 0")
    return settings


def make_dataset(paths: Paths, settings: Settings, n_workers: int, max_errors: int) -> None:
    """Makes the dataset folder paths.tar_root_dir. Raises UserError naming the file that can't be used."""
    folder = Path(paths.tar_root_dir or "")
    if folder.exists():
        raise UserError(f"{folder}: is there already; remove it, or name another target")
    listing = make_listing(paths)
    print(
        f"{len(listing.train):,} training and {len(listing.val):,} validation pictures of "
        f"{len(listing.classes):,} classes",
        flush=True,
    )
    target = Target(
        unfinished(folder), settings.geometry.size, settings.batch, settings.layout, settings.parts
    )
    chosen = {
        "resize": settings.geometry.resize,
        "orientation": settings.geometry.orientation,
        "seed": settings.seed,
        **({"on_error": settings.on_error} if settings.on_error != "stop" else {}),
    }
    job = Job(folder, target, make_tasks(listing, settings), listing.classes, listing.class_names, chosen)
    done = build(job, n_workers, max_errors)
    print(
        f"{done.n_train:,} training and {done.n_val:,} validation images of "
        f"{len(listing.classes):,} classes in {folder}"
    )
    if done.n_bad:
        print(f"{done.n_bad:,} bad pictures are listed in {folder / BAD_LIST}")


if __name__ == "__main__":
    sys.exit(main())
