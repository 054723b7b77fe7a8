"""The relative difference between two trainers and one with twice the batch, step by step on the digits.

    python -m benchmarks.drift

It compares one trainer with batches of 64 and two with batches of 32, in float64, in float32, and in float32
with a smooth network (no ReLU, no maximum pooling). The effect of rounding only is measured by two runs of
one trainer in float32, of which one starts with randomly changed last bits of the weights.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.lone import UnlaunchedTrainer
from benchmarks.measure import table, write_results
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config, Layer, resolve
from lockstep.launch.ranks import run_ranks
from models import smallnet

STEPS = (1, 10, 20, 29)
RATE, BATCH = 0.02, 64
KINDS = ("weights", "momenta")
DATA: dict[str, Any] = {"data_folder": "data/digits"}

State = dict[str, np.ndarray]  # weights and momenta, each as one vector, float64


class SmoothNet(smallnet.Model):
    """smallnet with tanh instead of ReLU and average instead of maximum pooling."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images / 64
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.avg_pool2d(torch.tanh(conv(x)), 2)
        return self.fc5(self.dropout(torch.tanh(self.fc4(x.flatten(1)))))


def train(rank: int, pipes: dict[int, Pipe], config: Config, dtype: torch.dtype, shaken: bool) -> list[State]:
    """Return the state after each of STEPS; `shaken` changes the last bits of the initial weights."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    trainer = UnlaunchedTrainer(config, Group.on_one_host(rank, pipes))
    if shaken:
        shake(trainer)
    return list(itertools.islice(states_of(trainer), len(STEPS)))


def states_of(trainer: UnlaunchedTrainer) -> Iterator[State]:
    """Yield weights and momenta after each number of steps in STEPS."""
    n_samples, n_done = len(trainer.dataset.train), 0
    while True:
        trainer.begin_epoch()
        while trainer.position < n_samples:
            trainer.train_step(-(-n_samples // BATCH))
            n_done += 1
            if n_done in STEPS:
                tensors = trainer.program.arena.tensors
                yield {kind: vector_of(kind, tensors) for kind in KINDS}
        trainer.validate()
        trainer.epoch, trainer.position = trainer.epoch + 1, 0


def vector_of(kind: str, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Return all tensors of a kind as one float64 vector, in the order of their names."""
    parts = [tensors[name].numpy().ravel() for name in sorted(tensors) if name.startswith(f"{kind}/")]
    return np.concatenate(parts, dtype=np.float64)


def shake(trainer: UnlaunchedTrainer) -> None:
    """Change the last bit of each weight at random by +1, -1 or 0."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in trainer.program.arena.tensors.items():
        if name.startswith("weights/"):
            sign = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.dtype)
            tensor.copy_(torch.nextafter(tensor, tensor + sign))


def states(n_trainers: int, model: str, dtype: torch.dtype, shaken: bool = False) -> list[State]:
    """Train, and return the states of the first trainer. With `shaken`, its weights start a rounding away."""
    keys: dict[str, Any] = {"model": model, "devices": ["cpu"] * n_trainers, "para_load": False}
    keys |= {"batch_size": BATCH // n_trainers, "learning_rate": RATE, **DATA}
    config, _ = resolve([Layer("benchmark", keys)])
    first: list[State] = run_ranks(train, n_trainers, config, dtype, shaken)[0]
    return first


def differences(ours: list[State], theirs: list[State]) -> dict[str, list[float]]:
    """Return the relative differences of weights and of momenta after each of STEPS."""
    return {
        kind: [
            float(np.linalg.norm(a[kind] - b[kind]) / np.linalg.norm(b[kind]))
            for a, b in zip(ours, theirs, strict=True)
        ]
        for kind in KINDS
    }


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    digits, smooth = "smallnet", "benchmarks.drift:SmoothNet"
    one = states(1, digits, torch.float32)
    pairs = {
        "two trainers and one, float64": (states(2, digits, torch.float64), states(1, digits, torch.float64)),
        "two and one, float32, no kinks": (
            states(2, smooth, torch.float32),
            states(1, smooth, torch.float32),
        ),
        "two and one, float32": (states(2, digits, torch.float32), one),
        "one and one, last bits shaken, float32": (states(1, digits, torch.float32, shaken=True), one),
    }
    numbers = {name: differences(*pair) for name, pair in pairs.items()}
    rows: list[tuple[str, ...]] = [("relative difference in", "of", *(f"after step {n}" for n in STEPS))]
    for name, found in numbers.items():
        rows += [(kind, name, *(f"{value:.0e}" for value in found[kind])) for kind in KINDS]
    title = f"Drift: the digits' net at learning rate {RATE}, {BATCH} images a step"
    return table(title, rows), {f"drift: {name}": found for name, found in numbers.items()}


if __name__ == "__main__":
    section = run()
    print(section[0])
    write_results(Path("docs/results"), "drift", [section], "python -m benchmarks.drift")
