"""A dataset folder of random images for the sections that read real files."""

import os
from pathlib import Path

import numpy as np

from benchmarks.gpu.setting import Setting
from lockstep.data import hkl


def dataset_folder(setting: Setting, work: Path) -> Path:
    """Return the dataset folder, written by the first section that needs it, warm in the page cache."""
    folder = work / "images"
    if not folder.exists():
        made = work / f"images-{os.getpid()}"
        _make(setting, made)
        made.rename(folder)
    return folder


def _make(setting: Setting, folder: Path) -> None:
    random = np.random.default_rng(0)
    size, n_classes = setting.picture, setting.n_classes
    shape = (setting.batch_size, size, size, 3)
    for split, n_files, n_links in (("train", setting.n_files, setting.n_links), ("val", 1, 1)):
        images = folder / f"{split}_hkl"
        images.mkdir(parents=True)
        for number in range(n_files):
            hkl.write(images / f"{number:04d}-0.hkl", random.integers(0, 256, shape, dtype=np.uint8))
            for link in range(1, n_links):
                (images / f"{number:04d}-{link}.hkl").hardlink_to(images / f"{number:04d}-0.hkl")
        labels = random.integers(0, n_classes, n_files * n_links * setting.batch_size)
        (folder / "labels").mkdir(exist_ok=True)
        np.save(folder / "labels" / f"{split}_labels.npy", labels)
    (folder / "misc").mkdir()
    np.save(folder / "misc" / "img_mean.npy", random.uniform(100, 130, shape[1:]).astype(np.float32))
