"""A replica of a small network, and batches for it, to take single steps with."""

from pathlib import Path
from typing import Any

import torch
from conftest import make_config
from torch import nn

from lockstep.comm.messages import Order
from lockstep.data.dataset import open_dataset
from lockstep.loading import Batch
from lockstep.memory.host import HostMemory
from lockstep.network.recorder import HostStopwatch, Recorder
from lockstep.network.replica import Replica


class TwoHeads(nn.Module):
    """A small network with an auxiliary head and its own mean and scale for images."""

    input_size = 8
    input_mean = (100.0, 120.0, 140.0)
    input_scale = (1 / 64, 1 / 32, 1 / 16)
    aux_weights: tuple[float, ...] = (0.3,)

    def __init__(self, n_classes: int, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.fc = nn.Linear(36, n_classes)
        self.aux = nn.Linear(36, n_classes)

    def forward(self, images: torch.Tensor) -> Any:
        x = torch.tanh(self.norm(self.conv(images))).flatten(1)
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


class WithoutWeights(TwoHeads):
    """The same network without the weight of its auxiliary loss, which is an error."""

    aux_weights = ()


class Counting(TwoHeads):
    """The same network with an integer buffer, which counts the calls in training."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes, norm=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images: torch.Tensor) -> Any:
        self.calls += self.training
        return super().forward(images)


class Teaching(TwoHeads):
    """The same network with a teacher, a moving average of its first layer: of parameters or of buffers."""

    def __init__(self, n_classes: int, as_buffer: bool = False) -> None:
        super().__init__(n_classes)
        start = torch.zeros_like(self.conv.weight)
        if as_buffer:
            self.register_buffer("teacher", start)
        else:
            self.teacher = nn.Parameter(start, requires_grad=False)

    def forward(self, images: torch.Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.teacher.lerp_(self.conv.weight, 0.5)
        return super().forward(images)


class Warming(Counting):
    """The same network, whose outputs depend on the calls so far and on a flag."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.register_buffer("is_warm", torch.tensor(False))

    def forward(self, images: torch.Tensor) -> Any:
        outputs = super().forward(images)
        self.is_warm |= self.calls >= 9
        if not self.training:
            return outputs
        return tuple(x * torch.where(self.is_warm, 1.0, 1 / (10 - self.calls.clamp(max=9))) for x in outputs)


def make_replica(folder: Path, **values: object) -> Replica:
    config = make_config(**{"model": "small_replicas:TwoHeads", "data_folder": str(folder), **values})
    replica = Replica(config, open_dataset(config), HostMemory())
    replica.begin_epoch(1, 90, config.learning_rate)
    return replica


def make_batch(number: int, n_images: int = 6) -> Batch:
    random = torch.Generator().manual_seed(number)
    images = 60 * torch.randn(n_images, 3, 8, 8, generator=random)
    labels = torch.randint(0, 7, (n_images,), generator=random)
    return Batch(Order("train", 1, 1, 0, n_images, 0, n_images), images, labels, torch.arange(n_images))


def recorder() -> Recorder:
    return Recorder(torch.device("cpu"), HostStopwatch())


def take_step(replica: Replica, batch: Batch, mean_n_samples: float, rank: int = 0) -> None:
    replica.forward_backward(batch, mean_n_samples, rank, recorder())
    replica.optimizer.step()


def update(replica: Replica, number: int) -> None:
    take_step(replica, make_batch(number), 6)
