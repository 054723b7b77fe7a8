"""Where and how theano_alexnet keeps its batches and labels. Its folders are read as they are.

    train_hkl_b256_b_256/0000.hkl ...                  uint8 (channel, row, column, batch)
    train_hkl_b256_b_128/0000_0.hkl 0000_1.hkl ...     the same batches in halves, one for each of two GPUs
    labels/train_labels.npy, train_labels_0.npy, train_labels_1.npy
    misc/img_mean.npy                                  float64 (channel, row, column)

Batch k is files k_0 and k_1 one after the other; in quarters k_00, k_10, k_01, k_11: the digits count
backwards. The labels of the halves are every second stretch of as many labels as a half has images. Images
beyond the last whole batch were never written; their labels are at the end of train_labels.npy.
"""

import re
from pathlib import Path

import numpy as np

from lockstep.data.hkl import HklArray

_PART = re.compile(r"(.+)_([01]+)")
_FOLDER = re.compile(r"(train|val)_hkl_b\d+_b_(\d+)")
SUFFIXES = {1: ("",), 2: ("_0", "_1"), 4: ("_00", "_10", "_01", "_11")}


def find_folder(folder: Path, split: str) -> Path | None:
    """The folder of 'train' or 'val' batches in `folder`; whole batches where there are both."""
    found = []
    for path in folder.glob(f"{split}_hkl_b*"):
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[2]), path))
    return max(found)[1] if found else None


def place(path: Path) -> tuple[str, str]:
    """Where a file comes in the order of all: sort by this."""
    match = _PART.fullmatch(path.stem)
    stem, part = (match[1], match[2][::-1]) if match else (path.stem, "")
    return stem.zfill(12) if stem.isdecimal() else stem, part  # 10000 comes after 9999


def is_c01b(file: HklArray) -> bool:
    """Whether an array looks like images with the channel first (not if it has 3 images)."""
    return len(file.shape) == 4 and file.shape[0] == 3 and file.shape[3] != 3


def join_labels(parts: list[np.ndarray], n_rows: int) -> np.ndarray:
    """The labels of all images from those of halves or quarters, whose files have `n_rows` images each."""
    stretches = np.stack([part.reshape(-1, n_rows) for part in parts], axis=1)
    return stretches.reshape(-1)


def split_labels(labels: np.ndarray, n_parts: int, n_rows: int) -> list[np.ndarray]:
    """The opposite: one array for each of the parts; labels beyond the last whole batch are left out."""
    whole = len(labels) // (n_parts * n_rows) * (n_parts * n_rows)
    stretches = labels[:whole].reshape(-1, n_parts, n_rows)
    return [stretches[:, part].reshape(-1) for part in range(n_parts)]
