"""A program that trains a class of its own, as a script, a command, or the cell of a notebook."""

from pathlib import Path

PROGRAM = """
import sys
import torch
from torch import nn

import lockstep

print("once", flush=True)

class Net(nn.Module):
    input_size = 32

    def __init__(self, n_classes, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, 2), nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(width * 15 * 15, n_classes)

    def forward(self, images):
        return self.last(self.layers(images / 64))

keys = dict(n_classes=7, batch_size=8, devices=["cpu", "cpu"], weights_dir=FOLDER, quiet=True)
run = lockstep.train(DATA, model=Net, model_args={"width": 3}, n_epochs=1, **keys)
print(type(run.model()).__name__, run.model().last.in_features, run.complete)
"""


def program_for(data: Path, folder: Path) -> str:
    return PROGRAM.replace("DATA", repr(str(data))).replace("FOLDER", repr(str(folder / "runs")))
