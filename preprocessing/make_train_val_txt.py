"""Writes Caffe-style lists of pictures, train.txt and val.txt: "path label" a line, sorted.

    python preprocessing/make_train_val_txt.py /data/imagenet lists
    python preprocessing/make_train_val_txt.py                   as preprocessing/paths.yaml says, into misc/

make_hkl.py takes the same sources, and writes these lists into the dataset folder's misc/ itself; this is for
other programs. Labels are places among the sorted classes.

Exit code: 0 the lists are written; 2 something given can't be used.
"""

import argparse
import sys
from pathlib import Path

from lockstep.errors import UserError
from preprocessing.caffe_lists import write_list
from preprocessing.inputs import add_path_options, make_listing, read_paths


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. `arguments`: those of the command line, for the tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=Path, help="a folder of pictures, see make_hkl.py --help")
    parser.add_argument("folder", nargs="?", type=Path, help="where to write train.txt and val.txt")
    add_path_options(parser)
    words = parser.parse_args(arguments)
    try:
        paths = read_paths(words, words.source, words.folder)
        folder = words.folder or Path(paths.tar_root_dir or "") / "misc"
        listing = make_listing(paths)
        folder.mkdir(parents=True, exist_ok=True)
        for name, pictures in (("train.txt", listing.train), ("val.txt", listing.val)):
            write_list(folder / name, [(picture.name, picture.label) for picture in pictures])
            print(f"{len(pictures):,} lines in {folder / name}")
    except (UserError, OSError) as error:
        print(f"make_train_val_txt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
