"""The process of one contender: python -m benchmarks.peers.contender NAME

For each line `n` on standard input it takes `n` steps and prints their seconds. All contenders have the same
network, data, batch size and optimizer.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from benchmarks.lone import NEVER, LoneTrainer
from lockstep.config import Layer, resolve

Step = Callable[[], object]
BATCH = 32
_MEAN = 0.5 * 255
_DIGITS, _SIZE = Path("data/digits"), 32


class StockNorm(nn.LocalResponseNorm):
    """torch's normalization with the paper's definition of alpha."""

    def __init__(self) -> None:
        super().__init__(5, 5 * 1e-4, 0.75, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize in float32, because torch has no bfloat16 version for CPUs."""
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float()).to(x.dtype)


def lockstep_step(precision: str) -> Step:
    """Return the trainer's step on a resident batch."""
    from benchmarks.loading.augmenting import make_folder

    folder = Path(os.environ["PEERS_FOLDER"], f"lockstep-{precision}")
    if not folder.exists():
        make_folder(folder)
    keys = {"model": "alexnet", "model_args": {"variant": "theano_alexnet"}, "n_classes": 1000}
    lone = _lone(data_folder=str(folder), precision=precision, para_load=False, **keys)
    lone.use(lone.resident)
    return lone.step


def stock_step(precision: str, network: nn.Module | None = None) -> Step:
    """Return the step of a tutorial's loop: contiguous tensors, torch's layers, default SGD."""
    if network is None:
        network = importlib.import_module("models.alexnet").Model(1000, "theano_alexnet")
        network.norm = StockNorm()
    images, labels = torch.randn(BATCH, 3, 227, 227), torch.randint(0, 1000, (BATCH,))
    return _training(network, lambda: (images, labels), precision)


def torchvision_step(precision: str) -> Step:
    """Return the step of torchvision's AlexNet, a smaller network without normalization."""
    return stock_step(precision, importlib.import_module("torchvision.models").alexnet(num_classes=1000))


def lockstep_loop() -> Step:
    """Return the step of the digits' network with a loader process."""
    lone = _lone(data_folder=str(_DIGITS), model="smallnet")
    lone.use(lone.loaded)
    return lone.step


def dataloader_loop() -> Step:
    """Return the step of the same network with a DataLoader that reads JPEGs in one worker."""
    loader = torch.utils.data.DataLoader(Jpegs(), BATCH, shuffle=True, num_workers=1, drop_last=True)
    return _training(_smallnet(), _endless(lambda: iter(loader)).__next__, "fp32")


def hickle_loop() -> Step:
    """Return the step of the same network with theano_alexnet's loading: hickle, mean, crop, mirror."""
    return _training(_smallnet(), _endless(_hickle_epoch).__next__, "fp32")


class Jpegs(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The digits' images with random crops."""

    def __init__(self) -> None:
        root = Path("data/digits_jpeg/train")
        classes = sorted(path.name for path in root.iterdir())
        self._files = [
            (path, n) for n, name in enumerate(classes) for path in sorted((root / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[number]
        image = Image.open(path).convert("RGB").resize((36, 36))
        row, column = np.random.randint(0, 36 - _SIZE + 1, 2)
        pixels = np.asarray(image, np.float32)[row : row + _SIZE, column : column + _SIZE] - _MEAN
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), label


def _hickle_epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import hickle

    labels = np.load(_DIGITS / "labels" / "train_labels.npy")
    first = 0
    for path in sorted((_DIGITS / "train_hkl").glob("*.hkl")):
        images = hickle.load(str(path)).astype(np.float32) - _MEAN
        for start in range(0, len(images) - BATCH + 1, BATCH):
            row, column = np.random.randint(0, images.shape[1] - _SIZE + 1, 2)
            part = images[start : start + BATCH, row : row + _SIZE, column : column + _SIZE]
            batch = torch.from_numpy(part.transpose(0, 3, 1, 2).copy())
            yield batch, torch.from_numpy(labels[first + start : first + start + BATCH])
        first += len(images)


def _endless(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


def _smallnet() -> nn.Module:
    network: nn.Module = importlib.import_module("models.smallnet").Model(10)
    return network


def _training(network: nn.Module, batch: Callable[[], Any], precision: str) -> Step:
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9, weight_decay=0.0005)

    def step() -> None:
        images, labels = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = network(images)
        optimizer.zero_grad()
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()

    return step


def _lone(**keys: Any) -> LoneTrainer:
    common = {"devices": ["cpu"], "print_freq": NEVER, "batch_size": BATCH, "learning_rate": 1e-6}
    return LoneTrainer(resolve([Layer("benchmark", {**common, "timeout": 3600, **keys})])[0])


CONTENDERS: dict[str, Callable[[], Step]] = {
    **{f"Lockstep, AlexNet {p}": lambda p=p: lockstep_step(p) for p in ("fp32", "bf16")},  # type: ignore[misc]
    **{f"stock PyTorch, AlexNet {p}": lambda p=p: stock_step(p) for p in ("fp32", "bf16")},  # type: ignore[misc]
    **{f"torchvision's AlexNet {p}": lambda p=p: torchvision_step(p) for p in ("fp32", "bf16")},  # type: ignore[misc]
    "Lockstep, digits": lockstep_loop,
    "DataLoader on JPEGs, digits": dataloader_loop,
    "hickle.load as theano_alexnet, digits": hickle_loop,
}


def main(name: str) -> None:
    torch.set_num_threads(int(os.environ.get("PEERS_THREADS", "2")))
    step = CONTENDERS[name]()
    for _ in range(2):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - begin, time.process_time() - used, flush=True)
    os._exit(0)  # loaders and workers are not waited for: the one that asks has all it wanted


if __name__ == "__main__":
    main(sys.argv[1])
