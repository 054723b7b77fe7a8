"""The names and layouts of theano_alexnet's files of batches and labels, which are read unchanged.

    train_hkl_b256_b_256/0000.hkl ...                  uint8 (channel, row, column, batch)
    train_hkl_b256_b_128/0000_0.hkl 0000_1.hkl ...     the same batches in halves, one for each of two GPUs
    labels/train_labels.npy, train_labels_0.npy, train_labels_1.npy
    misc/img_mean.npy                                  float64 (channel, row, column)

Batch k is file k_0 followed by k_1; in quarters it is k_00, k_10, k_01, k_11, with the digits in reverse
order. A half's labels are every second group of labels, each group as long as a half's file. theano_alexnet
never wrote images beyond the last whole batch; their labels are at the end of train_labels.npy.
"""

import re
from pathlib import Path

import numpy as np

from lockstep.data.hkl import HklArray

_PART = re.compile(r"(.+)_([01]+)")
_FOLDER = re.compile(r"(train|val)_hkl_b\d+_b_(\d+)")
SUFFIXES = {1: ("",), 2: ("_0", "_1"), 4: ("_00", "_10", "_01", "_11")}


def find_folder(folder: Path, split: str) -> Path | None:
    """Return the folder of 'train' or 'val' batches, preferring whole batches, or None."""
    folders = []
    for path in folder.glob(f"{split}_hkl_b*"):
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            folders.append((int(match[2]), path))
    return max(folders)[1] if folders else None


def place(path: Path) -> tuple[str, str]:
    """Return the sort key of a file."""
    match = _PART.fullmatch(path.stem)
    stem, part = (match[1], match[2][::-1]) if match else (path.stem, "")
    return stem.zfill(12) if stem.isdecimal() else stem, part  # 10000 comes after 9999


def is_c01b(file: HklArray) -> bool:
    """Return whether an array looks like images with the channel first. It can't tell for 3 images."""
    return len(file.shape) == 4 and file.shape[0] == 3 and file.shape[3] != 3


def join_labels(parts: list[np.ndarray], n_rows: int) -> np.ndarray:
    """Return the labels of all images from those of halves or quarters with `n_rows` images per file."""
    groups = np.stack([part.reshape(-1, n_rows) for part in parts], axis=1)
    return groups.reshape(-1)


def split_labels(labels: np.ndarray, n_parts: int, n_rows: int) -> list[np.ndarray]:
    """Return the labels of each part, the inverse of `join_labels`, without those of an incomplete batch."""
    whole = len(labels) // (n_parts * n_rows) * (n_parts * n_rows)
    groups = labels[:whole].reshape(-1, n_parts, n_rows)
    return [groups[:, part].reshape(-1) for part in range(n_parts)]
