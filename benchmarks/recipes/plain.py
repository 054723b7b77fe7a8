"""The recipe of config_small_images.yaml in plain PyTorch, in one process with a DataLoader.

    python -m benchmarks.recipes.plain FOLDER EPOCHS SEED

FOLDER has the PNG files of preprocessing/make_fashion_mnist.py. It prints a JSON line for each epoch: its
number, the validation error, and the seconds since the first step. Crop and mirror are torchvision's where it
can be imported, else the same two lines by Pillow.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset

from models.resnet20 import Model

BATCH, RATE, MOMENTUM, DECAY, SMOOTHING, WARM_UP, PADDING = 128, 0.1, 0.9, 5e-4, 0.05, 1.0, 4


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The images of class folders, decoded once, as in torchvision's datasets of small images."""

    def __init__(self, folder: Path, change: Callable[[Image.Image], Image.Image] | None) -> None:
        self._change = change
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
        pairs = [(path, label) for label, place in enumerate(folders) for path in sorted(place.iterdir())]
        self.images = np.stack([np.asarray(Image.open(path)) for path, _ in pairs])
        self._labels = [label for _, label in pairs]
        self.mean = self.images.mean((0, 1, 2))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[number])
        if self._change:
            image = self._change(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self._labels[number]


def change_by_pillow(image: Image.Image) -> Image.Image:
    """Crop and mirror as torchvision's RandomCrop(32, padding=4) and RandomHorizontalFlip do."""
    row, column = (random.randrange(2 * PADDING + 1) for _ in "rc")
    padded = ImageOps.expand(image, PADDING)
    image = padded.crop((column, row, column + image.width, row + image.height))
    return ImageOps.mirror(image) if random.random() < 0.5 else image


def training_change(size: int) -> tuple[str, Callable[[Image.Image], Image.Image]]:
    """Return the name of the library, and the change of training images."""
    try:
        from torchvision import transforms
    except Exception:  # not installed, or built for another torch
        return "Pillow", change_by_pillow
    parts = transforms.RandomCrop(size, padding=PADDING), transforms.RandomHorizontalFlip()
    return "torchvision", transforms.Compose(parts)


def rate_at(progress: float, n_epochs: int) -> float:
    """Return the rate after so many epochs: a linear rise, then a cosine, both by steps."""
    if progress < WARM_UP:
        return RATE * (0.1 + 0.9 * progress / WARM_UP)
    return RATE * (1 + math.cos(math.pi * (progress - WARM_UP) / (n_epochs - WARM_UP))) / 2


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of the optimizer. As in Lockstep, only biases do not decay."""
    named = list(model.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith(".bias")]
    others = [parameter for name, parameter in named if not name.endswith(".bias")]
    return [{"params": others, "weight_decay": DECAY}, {"params": biases, "weight_decay": 0.0}]


def train(folder: Path, n_epochs: int, seed: int) -> None:
    """Train, and print a line after each epoch."""
    torch.manual_seed(seed)
    library, change = training_change(32)
    train_set, val_set = Images(folder / "train", change), Images(folder / "val", None)
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True}
    training = DataLoader(train_set, shuffle=True, **options)
    validation = DataLoader(val_set, **options)
    mean = torch.tensor(train_set.mean, dtype=torch.float32).view(3, 1, 1)
    model = Model(10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(groups_of(model), RATE, MOMENTUM, nesterov=True)
    begin = time.perf_counter()
    for epoch in range(1, n_epochs + 1):
        model.train()
        for number, (images, labels) in enumerate(training):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(epoch - 1 + number / len(training), n_epochs)
            optimizer.zero_grad()
            F.cross_entropy(model(prepared(images, mean)), labels, label_smoothing=SMOOTHING).backward()
            optimizer.step()
        error = validated(model, validation, mean)
        seconds = time.perf_counter() - begin
        line = {"epoch": epoch, "error_top1": error, "seconds": seconds, "library": library}
        print(json.dumps(line), flush=True)


def prepared(images: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return images as the network takes them: float32, without the mean, scaled, channels last."""
    return (images.float() - mean).mul(Model.input_scale).to(memory_format=torch.channels_last)


@torch.no_grad()
def validated(model: nn.Module, batches: "DataLoader[Any]", mean: torch.Tensor) -> float:
    """Return the top-1 error."""
    model.eval()
    wrong = n_images = 0
    for images, labels in batches:
        wrong += int((model(prepared(images, mean)).argmax(1) != labels).sum())
        n_images += len(labels)
    return wrong / n_images


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
