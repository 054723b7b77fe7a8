"""Crops and policies on one core: random resized and padded crops, TrivialAugment, and a whole loader."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.loading.augmenting import make_folder
from benchmarks.measure import both_medians, table, verdict
from lockstep.comm.messages import Order
from lockstep.config import Config, Layer, resolve
from lockstep.data.boxes import draw_boxes
from lockstep.data.dataset import open_dataset
from lockstep.data.operations import trivial_table
from lockstep.data.policies import AutoAugment
from lockstep.data.preparing import Preparer
from lockstep.loading.host import HostFiller, HostRing
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape

BATCH = 256
RESIZED, PADDED, TRIVIAL = 3000.0, 60_000.0, 0.8  # targets: images/s, images/s, share of Pillow's speed


def configure(**values: object) -> Config:
    """Return the configuration of this benchmark with some keys changed."""
    return resolve([Layer("benchmark", {"n_classes": 1000, "batch_size": BATCH, **values})])[0]


def preparing(config: Config, stored: int, size: int) -> Callable[[], object]:
    """Return a function that makes the images of a batch from bytes in memory."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (BATCH, stored, stored, 3), dtype=np.uint8)
    preparer = Preparer(config, (stored, stored), (size, size), np.full(3, 120.0))
    preparer.draw(True, 1, BATCH)
    margin = stored + 2 * preparer.padding - size
    crops = random.integers(0, (margin + 1, margin + 1, 2), (BATCH, 3), dtype=np.int32)
    samples, out = np.arange(BATCH), np.empty((BATCH, size, size, 3), np.uint8)
    return lambda: preparer.apply(images, samples, samples, crops, out)


def bare_resize(stored: int, size: int) -> Callable[[], object]:
    """Return a loop over torch's resize only, of rectangles as random_resized draws them."""
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (BATCH, stored, stored, 3), dtype=np.uint8))
    boxes = draw_boxes(random, BATCH, (stored, stored), (0.08, 1), (3 / 4, 4 / 3))
    boxes[boxes[:, 2] == 0] = 0, 0, stored, stored
    parts = [
        image[None, row : row + rows, column : column + columns].permute(0, 3, 1, 2)
        for image, (row, column, rows, columns) in zip(images, boxes.tolist(), strict=True)
    ]

    def loop() -> None:
        for part in parts:
            torch.nn.functional.interpolate(part, (size, size), mode="bilinear", antialias=True)

    return loop


def bare_loop(size: int) -> Callable[[], object]:
    """Return a loop over Pillow's operations only, with the same choices and without a loader around it."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (BATCH, size, size, 3), dtype=np.uint8)
    policy = AutoAugment(trivial_table((size, size), 31), 1, None)
    policy.draw(0, 1, BATCH)
    chosen = [policy.choices(sample)[0] for sample in range(BATCH)]

    def loop() -> None:
        for image, (operation, amount) in zip(images, chosen, strict=True):
            np.asarray(operation.apply(Image.fromarray(image), amount))

    return loop


def loading(folder: Path, **values: object) -> Callable[[], object]:
    """Return a function that fills a slot from the page cache as a loader of CPUs does."""
    config = configure(data_folder=str(folder), **values)
    size = 224, 224
    ring = HostRing(RingShape(1, BATCH, size, "float32", size))
    filler = HostFiller(Reader(config, open_dataset(config), size, lambda text: None), ring.block, ring.shape)
    return lambda: filler.fill(0, Order("train", 1, 1, 0, BATCH, 0, BATCH))


def measure(folder: Path) -> dict[str, float]:
    """Return the CPU seconds for one batch of 256 on one core."""
    same = {"rand_crop": False}
    functions = {
        "random_resized, 256 -> 224": preparing(configure(crop="random_resized"), 256, 224),
        "padded by 4, 32 -> 32": preparing(configure(crop="padded"), 32, 32),
        "TrivialAugment, 224": preparing(configure(auto_augment="trivial", **same), 224, 224),
        "a bare loop over Pillow's operations, 224": bare_loop(224),
        "torch's resize alone, of such rectangles": bare_resize(256, 224),
        "a loader with random_resized, from the file to float32": loading(folder, crop="random_resized"),
        "the same with TrivialAugment": loading(folder, crop="random_resized", auto_augment="trivial"),
        "the same with mixup instead": loading(folder, crop="random_resized", mixup=0.2),
    }
    return {name: cpu for name, (_, cpu) in both_medians(functions, rounds=5).items()}


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "set")
        seconds = measure(Path(folder) / "set")
    rates = {name: BATCH / value for name, value in seconds.items()}
    resized, padded, trivial, bare, alone, *_ = rates.values()
    share = f"{resized / alone:.2f} of torch's resize alone"
    verdicts = [f"{verdict(resized, RESIZED)}; {share}", verdict(padded, PADDED)]
    verdicts.append(f"{trivial / bare:.2f} of the bare loop, {verdict(trivial / bare, TRIVIAL)}")
    rows: list[tuple[str, ...]] = [("what", "images/s of one core's time", "")]
    for number, (name, rate) in enumerate(rates.items()):
        rows.append((name, f"{rate:,.0f}", verdicts[number] if number < len(verdicts) else ""))
    return table("Changing images of a batch of 256, mirrors included", rows), {"changing_seconds": seconds}
