"""The update of AlexNet's fully connected layers at 16 rows per trainer, by factors or by gradients.

A step computes the gradients, exchanges them and updates the weights. *Copied* gradients are computed in
autograd's memory and copied into the shared block; *born* ones are computed in the block; factors need none.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.measure import both_medians, table, verdict
from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.config import Layer, resolve
from lockstep.exchange.host import HostTransport
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory
from lockstep.memory.malloc import keep_freed_memory
from lockstep.network.gradients import InPlaceLinear
from lockstep.network.replica import Replica
from lockstep.sync import StepBarrier
from lockstep.sync.factory import make_rule

ROWS, AIMS = 16, {"copied": 1.5, "born": 1.2}
NAMES = {"copied": "gradients, copied", "born": "gradients, born in the block", "factors": "factors"}


class FullLayers(nn.Module):
    """fc6, fc7 and fc8 on the first 9,216 numbers of an image."""

    input_size = 56

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.fc6, self.fc7, self.fc8 = (
            nn.Linear(9216, 4096),
            nn.Linear(4096, 4096),
            nn.Linear(4096, n_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc6(images.flatten(1)[:, :9216]))
        logits: torch.Tensor = self.fc8(torch.relu(self.fc7(x)))
        return logits


class GradientAlgorithm:
    """One of the three algorithms, with its own replica."""

    def __init__(self, name: str, group: Group) -> None:
        keys = {"model": "benchmarks.step.factors:FullLayers", "devices": ["cpu"] * group.world.size}
        keys |= {"rule": "gradients", "factors": name == "factors", "batch_size": ROWS}
        config, memory = resolve([Layer("benchmark", keys)])[0], HostMemory()
        self._replica = Replica(config, SimpleNamespace(n_classes=1000, image_shape=(64, 64, 3)), memory)  # type: ignore[arg-type]
        arena, self._group, self._is_copied = self._replica.arena, group, name == "copied"
        n_threads = torch.get_num_threads()
        transport = HostTransport.open(arena.block, "f4", len(arena.flat), group, n_threads)
        self._rule = make_rule(config, self._replica, transport, {})
        self._replica.begin_epoch(1, 100, 1e-6)
        layers = [layer for layer in self._replica.model.modules() if isinstance(layer, InPlaceLinear)]
        self._given = [(each, *(1e-3 * torch.randn(ROWS, n) for n in each.weight.shape)) for each in layers]

    def step(self) -> None:
        for layer, errors, inputs in self._given:
            if self._is_copied:
                layer.gradients.add(layer.weight, errors.t() @ inputs)
            else:
                layer.gradients.add_product(layer.weight, errors, inputs)
            layer.gradients.add(layer.bias, errors.sum(0))
        self._rule.end_backward()
        self._rule.update(
            self._replica.optimizer, StepBarrier(self._group, Order("train", 1, 1, 0, 1, 0, 1), None, str)
        )


def measure(rank: int, pipes: dict[int, Pipe]) -> dict[str, tuple[float, float]]:
    """Return the wall and CPU seconds of each algorithm, with one thread per rank."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    keep_freed_memory()  # like trainers: memory of products is reused
    group = Group.on_one_host(rank, pipes)
    implementations = {name: GradientAlgorithm(name, group) for name in NAMES}
    return both_medians({name: way.step for name, way in implementations.items()}, rounds=11)


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    found = run_ranks(measure, 2)[0]
    rows: list[tuple[str, ...]] = [("what", "ms", "of processor time", "factors against it", "")]
    for key, name in NAMES.items():
        (wall, used), ratio = found[key], found[key][0] / found["factors"][0]
        words = verdict(ratio, AIMS[key]) if key in AIMS else ""
        rows.append((name, f"{wall * 1e3:.0f}", f"{used * 1e3:.0f}", f"{ratio:.2f} x", words))
    title = (
        f"AlexNet's fully connected layers, errors to weights: {ROWS} rows a trainer, 2 trainers, one thread"
    )
    return table(title, rows), {"factors": found}
