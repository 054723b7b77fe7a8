"""Writes scikit-learn's 1,797 handwritten digits as JPEG files in ImageNet's folder layout.

    python preprocessing/make_digits.py data/digits_jpeg

makes train/<class>/*.JPEG (1,437 files) and val/<class>/*.JPEG (360): 64 x 64 RGB, enlarged from the 8 x 8
originals. The digits are those of the "Optical recognition of handwritten digits" data (Alpaydin, Kaynak
1998), which come with scikit-learn, so nothing is downloaded.

Exit code: 0 the pictures are written; 1 they could not be.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIZE = 64
N_VAL = 360
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write train/ and val/")
    folder = parser.parse_args().folder
    digits = load_digits()
    # A fixed shuffle: neighbours in the file are by one writer, and validation should be as the rest.
    order = np.random.Generator(np.random.Philox(0)).permutation(len(digits.images))
    for place, number in enumerate(order):
        split = "val" if place < N_VAL else "train"
        name = NAMES[digits.target[number]]
        path = folder / split / f"{digits.target[number]}_{name}" / f"digit_{number:04d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        to_picture(digits.images[number]).save(path, "JPEG", quality=95)
    print(f"{len(order) - N_VAL} training and {N_VAL} validation pictures in {folder}")


def to_picture(image: np.ndarray) -> Image.Image:
    """An 8 x 8 image of whole numbers from 0 (paper) to 16 (ink) as a picture of SIZE x SIZE, ink white."""
    pixels = np.clip(image * 16, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB")


if __name__ == "__main__":
    main()
