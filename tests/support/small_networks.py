"""Small networks that tests train: each contains layers that are easy to get wrong."""

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models import smallnet


class TwoHeads(nn.Module):
    """A smooth network with two outputs in training and optional batch normalization."""

    input_size = 32
    input_scale = 1 / 64
    aux_weights = (0.3,)

    def __init__(self, n_classes: int, norm: bool = False) -> None:
        super().__init__()
        # Before a normalization a bias has a gradient of rounding errors only, which AdamW would scale up.
        self.conv = nn.Conv2d(3, 8, 4, 4, bias=not norm)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.fc, self.aux = nn.Linear(512, n_classes), nn.Linear(512, n_classes)

    def forward(self, images: torch.Tensor) -> Any:
        x = self.drop(torch.tanh(self.norm(self.conv(images))).flatten(1))
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


class Keyworded(TwoHeads):
    """TwoHeads whose layers get their images by keyword."""

    def forward(self, images: torch.Tensor) -> Any:
        x = torch.tanh(self.norm(input=self.conv(input=images))).flatten(1)
        x = self.drop(input=x)
        return (self.fc(input=x), self.aux(input=x)) if self.training else self.fc(input=x)


class GroupNormed(TwoHeads):
    """TwoHeads with a group norm behind its convolution: a module, a function, or a script."""

    def __init__(self, n_classes: int, norm: str = "module") -> None:
        super().__init__(n_classes)
        made = _GroupNorm() if norm == "function" else nn.GroupNorm(2, 8)
        self.norm = torch.jit.script(made) if norm == "script" else made


class _GroupNorm(nn.Module):
    """A group norm that no nn.GroupNorm computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2, self.weight, self.bias)


class Normalizing(TwoHeads):
    """TwoHeads that normalizes the weights of its output in every forward pass, also in evaluation."""

    def forward(self, images: torch.Tensor) -> Any:
        with torch.no_grad():
            self.fc.weight.div_(self.fc.weight.norm(dim=1, keepdim=True))
        return super().forward(images)


class SmoothNet(smallnet.Model):
    """smallnet with tanh instead of ReLU and average instead of maximum pooling."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images / 64
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.avg_pool2d(torch.tanh(conv(x)), 2)
        return self.fc5(self.dropout(torch.tanh(self.fc4(x.flatten(1)))))


class DiesAtThirdStep(TwoHeads):
    """A network with a bug that kills its process in the third forward pass of training."""

    n_passes = 0

    def forward(self, images: torch.Tensor) -> Any:
        self.n_passes += self.training
        if self.n_passes == 3:
            signal.raise_signal(signal.SIGSEGV)
        return super().forward(images)


class LeavesNoThreads(TwoHeads):
    """A network after whose first pass its process can't start a thread, as at the limit of processes."""

    def forward(self, images: torch.Tensor) -> Any:
        if self.training:
            threading.stack_size(1 << 46)  # the limit itself does not hold for root
        return super().forward(images)


class TakesLongToBuild(TwoHeads):
    """A network that no trainer finishes building, for tests of what happens before the first step.

    The environment can say otherwise, for a first part of a run.
    """

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        time.sleep(float(os.environ.get("SECONDS_TO_BUILD", "600")))


class StopsAtSixthStep(TwoHeads):
    """A network that stands still in the sixth forward pass of training, where the environment says so.

    Passes before it are slow, so that the memory checkpoint of a step is whole before the next step's end.
    """

    n_passes = 0

    def forward(self, images: torch.Tensor) -> Any:
        self.n_passes += self.training and torch.is_grad_enabled()  # a trial of the network is no step
        if "STAND_STILL" in os.environ:
            time.sleep(600 if self.n_passes == 6 else 0.5)
        return super().forward(images)


class LooksUp(TwoHeads):
    """A network that uses rows of a table, each many times: torch adds the gradient of a row by threads."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.table = nn.Parameter(torch.zeros(16, 32))
        self.register_buffer("rows", torch.arange(4096) % 16)
        self.register_buffer("factors", torch.arange(4096 * 32.0).sin().view(4096, 32))

    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images * (1 + (self.table[self.rows] * self.factors).mean()))


class FullLayers(nn.Module):
    """A smooth network of linear layers: one is frozen, one is used twice, two share a weight."""

    input_size = 32
    input_scale = 1 / 64

    def __init__(self, n_classes: int, norm: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8)
        self.first, self.wide, self.odd = nn.Linear(512, 100), nn.Linear(100, 201), nn.Linear(201, 99)
        self.frozen, self.twice, self.tied = nn.Linear(99, 100), nn.Linear(100, 100), nn.Linear(100, 100)
        self.frozen.requires_grad_(False)
        self.tied.weight = nn.Parameter(self.twice.weight.detach().clone())
        self.also = nn.Linear(100, 100, bias=False)
        self.also.weight = self.tied.weight
        self.last, self.drop = nn.Linear(100, n_classes), nn.Dropout(0.3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.conv(images))).flatten(1)
        for layer in (
            self.first,
            self.wide,
            self.odd,
            self.frozen,
            self.twice,
            self.twice,
            self.tied,
            self.also,
        ):
            x = self.drop(torch.tanh(layer(x)))
        logits: torch.Tensor = self.last(x)
        return logits


class GroupedNet(nn.Module):
    """A network with grouped and strided convolutions, a frozen layer and an unused layer."""

    input_size = 8
    input_scale = 1 / 64

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1, groups=2)
        self.frozen = nn.Linear(54, 20).requires_grad_(False)
        self.unused = nn.Linear(5, 4)
        self.fc = nn.Linear(20, n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv2(torch.relu(self.norm(self.conv1(images)))))
        logits: torch.Tensor = self.fc(torch.relu(self.frozen(x.flatten(1))))
        return logits
