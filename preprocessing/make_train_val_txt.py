"""Write Caffe's sorted lists of images, train.txt and val.txt, with a path and a label per line.

    python preprocessing/make_train_val_txt.py /data/imagenet lists
    python preprocessing/make_train_val_txt.py                   as preprocessing/paths.yaml says, into misc/

make_hkl.py reads the same sources and writes these lists into the dataset folder's misc/. This script is for
other programs. A label is the index among the sorted classes.

Exit code: 0: the lists are written. 2: an argument can't be used.
"""

import sys
from pathlib import Path

from lockstep.programs import make_parser, reports_errors
from preprocessing.caffe_lists import write_list
from preprocessing.inputs import VAL_SPLIT, add_path_options, list_images, read_paths


@reports_errors("make_train_val_txt", OSError)
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("source", nargs="?", type=Path, help="a folder of images, see make_hkl.py --help")
    parser.add_argument("folder", nargs="?", type=Path, help="where to write train.txt and val.txt")
    add_path_options(parser)
    words = parser.parse_args(arguments)
    paths = read_paths(words, words.source, words.folder)
    folder = words.folder or Path(paths.tar_root_dir or "") / "misc"
    listing = list_images(paths, words.source, VAL_SPLIT)
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in (("train.txt", listing.train), ("val.txt", listing.val)):
        write_list(folder / name, [(image.name, image.label) for image in images])
        print(f"{len(images):,} lines in {folder / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
