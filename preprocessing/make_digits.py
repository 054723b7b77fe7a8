"""Write scikit-learn's 1,797 handwritten digits as JPEG files in ImageNet's folder layout.

    python preprocessing/make_digits.py data/digits_jpeg

The script makes train/<class>/*.JPEG (1,437 files) and val/<class>/*.JPEG (360): 64 x 64 RGB, enlarged from
the 8 x 8 originals. The digits are those of the "Optical recognition of handwritten digits" data (Alpaydin,
Kaynak 1998), which come with scikit-learn, so nothing is downloaded.

Exit code: 0: the images are written. 2: a package is missing. 1: they could not be written.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.extras import require
from lockstep.programs import make_parser, reports_errors

SIZE = 64
N_VAL = 360
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@reports_errors("make_digits")
def main() -> int:
    """Run the program and return its exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where to write train/ and val/")
    folder = parser.parse_args().folder
    write_digits(folder)
    return 0


def write_digits(folder: Path) -> None:
    """Write the images. Raise UserError if scikit-learn, which has them, is not installed."""
    require("making the digits", "demo", "sklearn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    # A fixed shuffle: neighbors in the file are by one writer, and both halves need all writers.
    order = np.random.Generator(np.random.Philox(0)).permutation(len(digits.images))
    for place, number in enumerate(order):
        split = "val" if place < N_VAL else "train"
        name = NAMES[digits.target[number]]
        path = folder / split / f"{digits.target[number]}_{name}" / f"digit_{number:04d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        to_image(digits.images[number]).save(path, "JPEG", quality=95)
    print(f"{len(order) - N_VAL} training and {N_VAL} validation images in {folder}")


def to_image(image: np.ndarray) -> Image.Image:
    """Enlarge an 8 x 8 image of integers from 0 (paper) to 16 (ink) to SIZE x SIZE, with white ink."""
    pixels = np.clip(image * 16, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB")


if __name__ == "__main__":
    sys.exit(main())
