"""An imbalanced copy of a dataset folder."""

from pathlib import Path

import numpy as np

from lockstep.data import hkl
from lockstep.data.dataset import Dataset, Split

RARE, SHARE = (2, 5, 8), 0.01  # of Fashion-MNIST: pullovers, sandals and bags
_ROWS = 256


def thin_out(source: Dataset, folder: Path) -> None:
    """Write a dataset folder with 1 % of the training images of three classes. It has no manifest."""
    labels = source.train.labels
    kept = ~np.isin(labels, RARE) | (np.random.default_rng(0).random(len(labels)) < SHARE)
    _write_split(folder, "train", source.train, np.flatnonzero(kept))
    _write_split(folder, "val", source.val, np.arange(len(source.val)))
    (folder / "misc").mkdir()
    np.save(folder / "misc" / "img_mean.npy", source.mean)


def _write_split(folder: Path, name: str, split: Split, chosen: np.ndarray) -> None:
    images = np.concatenate([hkl.read(file.path) for file in split.files])[chosen]
    (folder / f"{name}_hkl").mkdir(parents=True)
    for number, first in enumerate(range(0, len(images), _ROWS)):
        hkl.write(folder / f"{name}_hkl" / f"{number:04d}.hkl", images[first : first + _ROWS])
    (folder / "labels").mkdir(exist_ok=True)
    np.save(folder / "labels" / f"{name}_labels.npy", split.labels[chosen])
