"""Crop, mirror and mean subtraction on one core (256 to 227 pixels, uint8 to float32), and a whole loader."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import medians, table
from lockstep.comm.messages import Order
from lockstep.config import Layer, resolve
from lockstep.data import hkl
from lockstep.data.augment import Augmenter
from lockstep.data.dataset import open_dataset
from lockstep.launch.status import StatusBoard
from lockstep.loading.host import HostFiller, HostRing
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape

BATCH, SIZE, CROP = 256, 256, 227


def make_folder(folder: Path, batch: int = BATCH) -> None:
    """Write a dataset folder of two batches of random images."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        (folder / f"{split}_hkl").mkdir(parents=True)
        for number in range(2):
            images = random.integers(0, 256, (batch, SIZE, SIZE, 3), dtype=np.uint8)
            hkl.write(folder / f"{split}_hkl" / f"{number:04d}.hkl", images)
        (folder / "labels").mkdir(exist_ok=True)
        np.save(folder / "labels" / f"{split}_labels.npy", random.integers(0, 1000, 2 * batch))
    (folder / "misc").mkdir()
    np.save(folder / "misc" / "img_mean.npy", random.uniform(100, 130, (SIZE, SIZE, 3)))


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "set")
        seconds = measure(Path(folder) / "set")
    rows: list[tuple[str, ...]] = [("what", "images/s on one core", "against NumPy")]
    slowest = seconds["NumPy, image by image: subtract, crop, mirror"]
    for name, value in seconds.items():
        rows.append((name, f"{BATCH / value:,.0f}", f"{slowest / value:.1f} x"))
    title = "Preparing a minibatch of 256: crop 256 -> 227, mirror, subtract the mean, to float32"
    return table(title, rows), {"augmenting_seconds": seconds}


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds for one minibatch of 256."""
    config, _ = resolve(
        [Layer("benchmark", {"data_folder": str(folder), "n_classes": 1000, "batch_size": BATCH})]
    )
    dataset = open_dataset(config)
    images, mean = hkl.read(dataset.train.files[0].path), dataset.mean
    random = np.random.default_rng(1)
    crops = random.integers(0, (SIZE - CROP + 1, SIZE - CROP + 1, 2), (BATCH, 3), dtype=np.int32)
    out = np.empty((BATCH, CROP, CROP, 3), np.float32)
    augmenter = Augmenter(mean, (CROP, CROP))
    ring = HostRing(RingShape(1, BATCH, (CROP, CROP), "float32", (CROP, CROP)))
    reader = Reader(config, dataset, (CROP, CROP), StatusBoard.create().say)
    filler = HostFiller(reader, ring.block, ring.shape)

    def numpy_way() -> None:
        for i, (row, column, mirrored) in enumerate(crops.tolist()):
            crop = (images[i] - mean)[row : row + CROP, column : column + CROP]
            out[i] = crop[:, ::-1] if mirrored else crop

    return medians(
        {
            "NumPy, image by image: subtract, crop, mirror": numpy_way,
            "Lockstep's augmenter": lambda: augmenter.apply(images, crops, out),
            "Lockstep's loader, from the file (page cache) to the slot": lambda: filler.fill(
                0, Order("train", 1, 1, 0, BATCH, 0, BATCH)
            ),
        },
        rounds=9,
    )
