"""Merges of what several devices have made, always in the order of the devices, so with the same bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lockstep.exchange.fold import fold_all
from lockstep.flow.arrays import Array
from lockstep.flow.devices import Device
from lockstep.flow.operations import new, new_sparse, operation
from lockstep.flow.transfers import bring

Parts = list[list[Array]]  # of each device that has some: the arrays of a bucket


def reduce(parts: Parts, owner: Device, in_all: bool = False) -> Parts:
    """Adds up dense arrays in place, in the owner's memory, in chunks.

    The sums are in what came first. in_all: and in all others in that memory. Returns the parts as they are
    in the owner's memory.
    """
    here = [[bring(array, owner) for array in part] for part in parts]
    if len(here) == 1:
        return here
    own = [n for n, part in enumerate(parts) if part[0].place.memory == owner.memory]
    targets = [0, *(n for n in own if n)] if in_all else [0]
    name = "all_reduce" if in_all else "reduce"
    inputs = [array for part in here for array in part]
    written = [array for n in targets for array in here[n]]
    operation(name, partial(_add_up, len(here), targets), owner, inputs, written=written)
    return here


def _add_up(n_parts: int, targets: Sequence[int], *values: torch.Tensor) -> None:
    n_arrays = len(values) // n_parts
    for first in range(n_arrays):
        add_up([values[first + n * n_arrays] for n in range(n_parts)], targets)


def add_up(values: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
    """Writes the sum of contiguous tensors into some of them."""
    flat = [value.view(-1) for value in values]
    if values[0].is_cpu and values[0].dtype in (torch.float32, torch.float64):
        arrays = [tensor.numpy() for tensor in flat]
        fold_all(arrays, [arrays[n] for n in targets], "sum")
        return
    total = flat[0] + flat[1]
    for value in flat[2:]:
        total += value
    for number in targets:
        flat[number].copy_(total)


def reduce_sparse(parts: Parts, owner: Device) -> Array:
    """One sparse array: all entries in the order of the devices, equal rows added up; never dense."""
    inputs = [bring(part[0], owner) for part in parts]
    merged = new_sparse(owner, inputs[0])
    operation("reduce", _coalesce, owner, inputs, made=[merged])
    return merged


def _coalesce(*values: torch.Tensor) -> torch.Tensor:
    indices = torch.cat([value._indices() for value in values], 1)
    entries = torch.cat([value._values() for value in values])
    return torch.sparse_coo_tensor(indices, entries, values[0].size(), check_invariants=False).coalesce()


def broadcast(sources: Sequence[Array], targets: Sequence[Array], device: Device) -> None:
    """Copies arrays into others, which are on the device."""
    brought = [bring(source, device) for source in sources]
    operation("broadcast", _copy, device, [*brought, *targets], written=targets)


def _copy(*values: torch.Tensor) -> None:
    half = len(values) // 2
    for source, target in zip(values[:half], values[half:], strict=True):
        target.copy_(source)


def mean(parts: Parts, fractions: Sequence[Array], owner: Device) -> list[Array]:
    """New arrays: the means of the parts, weighted by scalar arrays."""
    inputs = [bring(array, owner) for part in parts for array in part]
    weights = [bring(array, owner) for array in fractions]
    made = [new(owner, array.shape, array.dtype, inputs) for array in parts[0]]
    operation("all_reduce", partial(_mean, len(parts)), owner, [*weights, *inputs], made=made)
    return made


def _mean(n_parts: int, *values: Any) -> tuple[torch.Tensor, ...]:
    weights, arrays = [float(value) for value in values[:n_parts]], values[n_parts:]
    n_arrays = len(arrays) // n_parts
    means = []
    for first in range(n_arrays):
        total = arrays[first] * weights[0]
        for number in range(1, n_parts):
            total = total + arrays[first + number * n_arrays] * weights[number]
        means.append(total.contiguous())
    return tuple(means)
