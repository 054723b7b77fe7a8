"""A trainer's computation for a sum of two hosts without the network: rounding, adding, products of rows."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.hosts.scaling import ALEXNETS_FULL
from benchmarks.measure import processor_seconds
from lockstep.hosts.all_reduce import BFloat16AllReduce

N_HOSTS = 2


class _Nobody:
    """A group whose messages are sent at once, and which receives zeros at once."""

    def send(self, tensors: list[torch.Tensor], host: int, tag: int) -> None:
        """Discard the message."""

    def recv(self, tensors: list[torch.Tensor], host: int, tag: int) -> None:
        tensors[0].zero_()


def packing(wire: str, shard: torch.Tensor) -> Callable[[], object]:
    """Return a function that sums a trainer's shard, (n,), without the network; its result is meaningless."""
    if wire == "float32":  # it adds one half and gets the other
        ours, theirs = shard.tensor_split(N_HOSTS)
        return partial(ours[: len(theirs)].add_, theirs)
    begin, wait = (lambda method, *arguments: method(*arguments)), lambda *works: None
    algorithm = BFloat16AllReduce(_Nobody(), begin, wait, 0, N_HOSTS)
    return partial(algorithm.sum, shard)


def products(n_rows: int, n_trainers: int) -> Callable[[], object]:
    """Return a function that computes a trainer's share of the gradients of other hosts' n_rows rows."""
    pairs = []
    for layer in ALEXNETS_FULL:
        errors, inputs = torch.randn(n_rows, layer.m // n_trainers), torch.randn(n_rows, layer.n)
        pairs.append((errors.T, inputs, torch.zeros(errors.shape[1], layer.n)))
    return lambda: [torch.mm(errors, inputs, out=made) for errors, inputs, made in pairs]


def time_packing(wire: str) -> float:
    """Return the seconds per parameter of a host of two trainers, each of which packs half."""
    n_each = 1 << 22
    return processor_seconds(packing(wire, torch.randn(n_each))) / (2 * n_each)


def time_products(n_rows: int) -> float:
    """Return the seconds per multiplication of a host of two trainers, each of which computes half."""
    n_products = n_rows * sum(layer.m * layer.n for layer in ALEXNETS_FULL)
    return processor_seconds(products(n_rows, 2)) / n_products
