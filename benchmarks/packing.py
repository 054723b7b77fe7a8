"""What a trainer computes for a sum of two hosts, by itself: rounding and adding up, and products of rows."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.measure import processor_seconds
from benchmarks.scaling import ALEXNETS_FULL
from lockstep.hosts.network import WIRES
from lockstep.hosts.sums import Rounded

N_HOSTS = 2


class _Nobody:
    """A group in which all has been sent, and zeros have come, as soon as it is asked for."""

    def send(self, tensors: list[torch.Tensor], host: int, tag: int) -> None:
        """Gone."""

    def recv(self, tensors: list[torch.Tensor], host: int, tag: int) -> None:
        tensors[0].zero_()


def packing(wire: str, shard: torch.Tensor) -> Callable[[], object]:
    """Sums a trainer's shard, (n,), without the network: what comes of it means nothing."""
    if wire == "float32":  # it adds one half and gets the other
        ours, theirs = shard.tensor_split(N_HOSTS)
        return partial(ours[: len(theirs)].add_, theirs)
    begin, wait = (lambda method, *arguments: method(*arguments)), lambda *works: None
    way = Rounded(_Nobody(), begin, wait, 0, N_HOSTS, WIRES[wire](), shard.device)
    return partial(way.sum, shard)


def products(n_rows: int, n_trainers: int) -> Callable[[], object]:
    """Makes a trainer's share of AlexNet's factored gradients from n_rows more than those of its own host."""
    pairs = []
    for layer in ALEXNETS_FULL:
        errors, inputs = torch.randn(n_rows, layer.m // n_trainers), torch.randn(n_rows, layer.n)
        pairs.append((errors.T, inputs, torch.zeros(errors.shape[1], layer.n)))
    return lambda: [torch.mm(errors, inputs, out=made) for errors, inputs, made in pairs]


def time_packing(wire: str) -> float:
    """Seconds a parameter of a host of two trainers, each of which packs half of them."""
    n_each = 1 << 22
    return processor_seconds(packing(wire, torch.randn(n_each))) / (2 * n_each)


def time_products(n_rows: int) -> float:
    """Seconds a product of two numbers in a host of two trainers, each of which makes half of them."""
    n_products = n_rows * sum(layer.m * layer.n for layer in ALEXNETS_FULL)
    return processor_seconds(products(n_rows, 2)) / n_products
