"""Gain and cost of `recompute: true`: ResNet-50's memory for the backward pass, and processor time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.measure import processor_seconds, table
from lockstep.network.stages import recompute
from models.resnet50 import Model

BATCH = 8
SIZE = 224


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    torch.set_num_threads(1)
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(memory_format=torch.channels_last)
    networks = {"false": make_network(), "true": make_network()}
    recompute(networks["true"], "resnet50")
    kept = {name: kept_bytes(network, images) / BATCH / 1e6 for name, network in networks.items()}
    seconds = {name: processor_seconds(step_of(each, images), 3) for name, each in networks.items()}
    rows: list[tuple[str, ...]] = [
        ("recompute", "kept for the backward pass, MB per image", "CPU s of both passes", "")
    ]
    for name in networks:
        rows.append(
            (name, f"{kept[name]:.1f}", f"{seconds[name]:.2f}", f"{seconds[name] / seconds['false']:.2f} x")
        )
    title = f"Recomputing ResNet-50's blocks: float32, batch {BATCH}, {SIZE} x {SIZE} pixels, one thread"
    return table(title, rows), {"recomputing": {"kept_mb": kept, "cpu_seconds": seconds}}


def make_network() -> nn.Module:
    """Return ResNet-50 with seeded weights, channels last."""
    torch.manual_seed(0)
    return Model(1000).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def kept_bytes(network: nn.Module, images: torch.Tensor) -> int:
    """Return the bytes of all tensors that a forward pass saves, parameters and buffers excluded."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(images)  # kept until here, so that no saved memory is freed and used again
    del output
    return sum(sizes.values())


def step_of(network: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    """Return a function that computes the gradients of a batch."""

    def step() -> None:
        network.zero_grad()
        network(images).sum().backward()

    return step
