"""Write Fashion-MNIST's 70,000 images of clothes as PNG files in ImageNet's folder layout.

    python preprocessing/make_fashion_mnist.py data/fashion_png --border 2
    python preprocessing/make_hkl.py data/fashion_png data/fashion32 --size 32

The first command makes train/<class>/*.png (60,000 files) and val/<class>/*.png (10,000), 28 x 28 RGB with a
black border, out of the four files of Xiao, Rasul, Vollgraf 2017 (arXiv 1708.07747): train-images-idx3-ubyte,
train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each as it is or with .gz. They
are in Debian's package dataset-fashion-mnist. Files elsewhere are named first:

    python preprocessing/make_fashion_mnist.py downloads data/fashion_png

Nothing is downloaded.

Exit code: 0: the images are written. 1: they could not be. 2: a file is missing or damaged.
"""

import gzip
import math
import sys
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.errors import UserError
from lockstep.programs import make_parser, reports_errors

NAMES = ["t_shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle_boot"]
PACKAGED = Path("/usr/share/datasets/fashion-mnist")  # Debian's
SPLITS = {"train": "train", "val": "t10k"}
# An idx file starts with two zero bytes, its type, its number of dimensions, and each dimension, big-endian.
UINT8 = 8


@reports_errors("make_fashion_mnist")
def main() -> int:
    """Run the program and return its exit code."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "files", type=Path, nargs="?", default=PACKAGED, help=f"the folder with the four files ({PACKAGED})"
    )
    parser.add_argument("folder", type=Path, help="where to write train/ and val/")
    parser.add_argument("--border", type=int, default=0, help="black pixels on each side of an image (0)")
    args = parser.parse_args()
    if args.border < 0:
        parser.error(f"--border: must be at least 0, not {args.border}")
    for split, name in SPLITS.items():
        print(f"{write(args.files, name, args.folder / split, args.border)} images in {args.folder / split}")
    return 0


def write(files: Path, name: str, folder: Path, border: int = 0) -> int:
    """Write the images of one pair of files by class, and return their number."""
    images = read(files / f"{name}-images-idx3-ubyte", 3)
    labels = read(files / f"{name}-labels-idx1-ubyte", 1)
    if len(images) != len(labels) or labels.max(initial=0) >= len(NAMES):
        raise UserError(f"{files}: the labels of {name} are not those of its {len(images)} images")
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        path = folder / f"{label}_{NAMES[label]}" / f"{name}_{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.pad(image, border)).convert("RGB").save(path)
    return len(images)


def read(path: Path, n_dimensions: int) -> np.ndarray:
    """Return the uint8 array of an idx file, packed or not. Raise UserError if it is missing or damaged."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: can't be read, with .gz or without: {error}") from error
    begin = 4 + 4 * n_dimensions
    shape = tuple(int.from_bytes(data[first : first + 4]) for first in range(4, begin, 4))
    if data[:4] != bytes([0, 0, UINT8, n_dimensions]) or len(data) != begin + math.prod(shape):
        raise UserError(f"{path}: is not a whole idx file of {n_dimensions} dimensions")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


if __name__ == "__main__":
    sys.exit(main())
