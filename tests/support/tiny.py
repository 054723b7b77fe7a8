"""A small network with AlexNet's kinds of layers, and helpers to initialize it from pretrained weights."""

import sys
import types
from pathlib import Path

import torch
from conftest import make_config
from torch import nn

from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.network.build import build_model
from lockstep.pretrained.weights import Pretrained, start_with


class Model(nn.Module):
    """Two convolutions (4 channels; 6 in two groups), pooling, and one or two fully connected layers."""

    input_size = 32

    def __init__(self, n_classes: int, hidden: bool = True, groups: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
        self.fc3 = nn.Linear(96, 10) if hidden else None
        self.dropout = nn.Dropout()
        self.fc4 = nn.Linear(10 if hidden else 96, n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(images))))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        if self.fc3 is not None:
            x = self.dropout(torch.relu(self.fc3(x)))
        return self.fc4(x)


module = types.ModuleType("models.tiny")
module.Model = Model  # type: ignore[attr-defined]
sys.modules["models.tiny"] = module


def start(path: Path | str, n_classes: int = 7, **keys: object) -> tuple[nn.Module, Arena, Pretrained]:
    """A new network with what `path` holds."""
    config = make_config(**{"model": "tiny", "n_classes": n_classes, "pretrained": str(path), **keys})
    model = build_model(config, n_classes)
    arena = Arena(
        model, HostMemory(), ("momenta",) if config.optimizer == "sgd" else (), config.ema_decay is not None
    )
    return model, arena, start_with(config, model, arena)


def fresh(n_classes: int = 7, **keys: object) -> nn.Module:
    """Return a new network without pretrained weights."""
    return build_model(make_config(**{"model": "tiny", **keys}), n_classes)
