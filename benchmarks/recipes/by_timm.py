"""The recipe of config_small_images.yaml by timm's parts: its loader, optimizer, schedule and loss.

    python -m benchmarks.recipes.by_timm FOLDER EPOCHS SEED

timm's train.py is not part of its package, so this loop stands for it: the same network and numbers, and
timm's functions with their own defaults wherever the recipe does not say something else. Unlike plain.py it
decodes images in each epoch and does not decay the gains of norms. It prints the lines that plain.py prints.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageDataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn
from torchvision import transforms

from benchmarks.recipes.plain import BATCH, DECAY, MOMENTUM, PADDING, RATE, SMOOTHING, WARM_UP, Images
from models.resnet20 import Model


def loader_of(folder: Path, mean: list[float], is_training: bool) -> Any:
    """Return timm's loader of class folders, with the padded crop that create_transform does not have."""
    dataset, std = ImageDataset(str(folder)), [1 / (255 * Model.input_scale)] * 3
    keys: dict[str, Any] = {"mean": mean, "std": std, "crop_pct": 1.0, "color_jitter": 0.0}
    keys |= {"num_workers": 2, "use_prefetcher": False}
    loader = create_loader(dataset, (3, Model.input_size, Model.input_size), BATCH, is_training, **keys)
    if is_training:
        crop = transforms.RandomCrop(Model.input_size, padding=PADDING), transforms.RandomHorizontalFlip()
        *_, to_tensor, normalize = dataset.transform.transforms
        dataset.transform = transforms.Compose([*crop, to_tensor, normalize])
    return loader


def schedule_of(optimizer: torch.optim.Optimizer, n_epochs: int, n_steps: int) -> Any:
    """Return a linear rise, then a cosine, both by steps; an epoch has `n_steps`."""
    rise = {"warmup_epochs": int(WARM_UP), "warmup_lr": RATE / 10, "warmup_prefix": True}
    by_step = {"step_on_epochs": False, "updates_per_epoch": n_steps}
    return create_scheduler_v2(optimizer, "cosine", n_epochs - int(WARM_UP), **rise, **by_step)[0]


def train(folder: Path, n_epochs: int, seed: int) -> None:
    """Train, and print a line after each epoch."""
    timm.utils.random_seed(seed, 0)
    mean = (Images(folder / "train", None).mean / 255).tolist()
    training, validation = (loader_of(folder / name, mean, name == "train") for name in ("train", "val"))
    n_classes = len(training.dataset.reader.class_to_idx)
    model = Model(n_classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = create_optimizer_v2(model, "sgd", RATE, DECAY, MOMENTUM)  # with Nesterov's momentum
    schedule = schedule_of(optimizer, n_epochs, len(training))
    loss_of, n_steps, begin = LabelSmoothingCrossEntropy(SMOOTHING), 0, time.perf_counter()
    for epoch in range(1, n_epochs + 1):
        model.train()
        for images, labels in training:
            optimizer.zero_grad()
            loss_of(model(images.to(memory_format=torch.channels_last)), labels).backward()
            optimizer.step()
            n_steps += 1
            schedule.step_update(n_steps)
        line = {"epoch": epoch, "error_top1": validated(model, validation)}
        line |= {"seconds": time.perf_counter() - begin, "library": f"timm {timm.__version__}"}
        print(json.dumps(line), flush=True)


@torch.no_grad()
def validated(model: nn.Module, batches: Any) -> float:
    """Return the top-1 error."""
    model.eval()
    wrong = sum(int((model(images).argmax(1) != labels).sum()) for images, labels in batches)
    return wrong / len(batches.dataset)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
