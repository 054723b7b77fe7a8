"""A network and a dataset that take longer in one process, whose name is in the environment."""

import os
import time

import numpy as np
import torch
from own_datasets import Squares
from torch import nn

from lockstep.launch.child_main import NAME

SLOW = "SLOW_PROCESS"  # environment variable: the process that sleeps longer, such as 'trainer 1'


def is_slow() -> bool:
    return SLOW in os.environ and os.environ.get(NAME) == os.environ[SLOW]


class Sleeps(nn.Module):
    """A network whose forward pass in training sleeps, so that its time hardly depends on the machine."""

    input_size = 32
    input_scale = 1 / 64

    def __init__(self, n_classes: int, seconds: float = 0.02, slow_seconds: float = 0.06) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 32 * 32, n_classes)
        self.seconds, self.slow_seconds = seconds, slow_seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.slow_seconds if is_slow() else self.seconds)
        logits: torch.Tensor = self.fc(images.flatten(1))
        return logits


class SlowToRead(Squares):
    """Squares that take longer to read in one process."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if is_slow():
            time.sleep(0.02)
        return super().__getitem__(index)


def make_slow_squares() -> tuple[Squares, Squares]:
    """Return the datasets for `data: uneven:make_slow_squares`."""
    return SlowToRead(320, 0), Squares(16, 1)
