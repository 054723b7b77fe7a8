"""Write the labels of a dataset folder again, from Caffe's lists and the order of its images.

    python preprocessing/make_labels.py data/imagenet --lists data/imagenet/misc
    python preprocessing/make_labels.py /scratch/ilsvrc12 --lists /scratch/ilsvrc12/misc --split 2 --batch 256

make_hkl.py also writes the labels. This script is for a folder whose labels were lost, also of
theano_alexnet. The order is in misc/train_order.txt or theano_alexnet's shuffled_train_filenames.npy, and in
val.txt. --split also writes the labels of halves (_0, _1) or quarters.

Exit code: 0: the labels are written. 2: an argument can't be used.
"""

import sys
from pathlib import Path

import numpy as np

from lockstep.errors import UserError
from lockstep.files import read_array
from lockstep.programs import make_parser, reports_errors
from preprocessing.caffe_lists import read_list, read_names
from preprocessing.finish import IMAGE_LISTS, write_labels


@reports_errors("make_labels", OSError)
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="the dataset folder")
    parser.add_argument("--lists", type=Path, help="where train.txt and val.txt are (<folder>/misc)")
    parser.add_argument(
        "--split", type=int, choices=[1, 2, 4], default=1, help="files that a batch is divided into (1)"
    )
    parser.add_argument("--batch", type=int, default=256, help="images in a file, for --split (256)")
    words = parser.parse_args(arguments)
    for split in ("train", "val"):
        labels = find_labels(words.folder, words.lists or words.folder / "misc", split)
        (words.folder / "labels").mkdir(exist_ok=True)
        write_labels(words.folder / "labels", split, labels, words.split, words.batch)
        print(f"{len(labels):,} {split} labels in {words.folder / 'labels'}")
    return 0


def find_labels(folder: Path, lists: Path, split: str) -> np.ndarray:
    """Return one int64 label per image, in the order of the files. Raise UserError if one is missing."""
    path = lists / f"{split}.txt"
    labels = dict(read_list(path))
    by_end: dict[str, int | None] = {}  # None: of images with several labels
    for name, label in labels.items():
        for end in {_in_folder(name), f"*/{Path(name).name}"}:
            by_end[end] = label if by_end.get(end, label) == label else None
    image_labels = []
    for name in read_order(folder, lists, split):
        # theano_alexnet's order has full paths. A name without a folder is unique in ImageNet.
        found = (
            labels.get(name),
            by_end.get(_in_folder(name)),
            labels.get(Path(name).name),
            by_end.get(f"*/{name}"),
        )
        known = next((label for label in found if label is not None), None)
        if known is None:
            raise UserError(f"{path}: has no line for {name}, which is in {folder}")
        image_labels.append(known)
    return np.array(image_labels, np.int64)


def _in_folder(name: str) -> str:
    """Return a path without the folders above its own."""
    return "/".join(Path(name).parts[-2:])


def read_order(folder: Path, lists: Path, split: str) -> list[str]:
    """Return the names of one half's images in the order of the files. Raise UserError if it is unknown."""
    if split == "val":  # shuffled neither here nor in theano_alexnet
        return read_names(lists / "val.txt")
    own = folder / IMAGE_LISTS[split]
    if own.exists():
        return read_names(own)
    path = folder / "misc" / "shuffled_train_filenames.npy"
    try:
        names = read_array(path)
    except UserError as error:
        raise UserError(f"{own} is missing: {error}") from error
    if names.dtype.kind not in "SU" or names.ndim != 1:
        raise UserError(f"{path}: holds {names.dtype} of shape {names.shape}, not names")
    if names.dtype.kind == "U":  # NumPy decodes any numbers as text
        codes = np.frombuffer(names.tobytes(), np.dtype("u4").newbyteorder(names.dtype.byteorder))
        if codes.max(initial=0) > sys.maxunicode:
            raise UserError(f"{path}: holds names that are not text")
    return [
        name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
        for name in names.tolist()
    ]


if __name__ == "__main__":
    sys.exit(main())
