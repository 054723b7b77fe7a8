"""Merges of what several devices have made, always in the order of the devices, so with the same bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lockstep.flow.arrays import Array
from lockstep.flow.devices import Device
from lockstep.flow.operations import new, new_sparse, operation
from lockstep.flow.transfers import bring

Parts = list[list[Array]]  # of each device that has some: the arrays of a bucket


def reduce(parts: Parts, owner: Device, in_all: bool = False) -> tuple[list[Array], Parts]:
    """Adds up dense arrays in place, on the owner, in chunks. Returns the sums, and the parts as used.

    The sums are in the owner's memory: in the first part there, or in a copy of the first of all. in_all: and
    in all other parts that the owner reaches. What it does not reach is copied into its memory first.
    """
    own = next((n for n, part in enumerate(parts) if part[0].place.memory == owner.memory), None)
    if own is None:
        own, parts = 0, [[bring(array, owner) for array in parts[0]], *parts[1:]]
    here = [
        part if all(owner.reaches(array.place, array.dtype) for array in part)
        else [bring(array, owner) for array in part]
        for part in parts
    ]  # fmt: skip
    if len(here) > 1:
        targets = [own, *(n for n, part in enumerate(here) if in_all and n != own and part is parts[n])]
        inputs = [array for part in here for array in part]
        written = [array for n in targets for array in here[n]]
        function = partial(_add_up, owner, len(here), targets)
        operation("all_reduce" if in_all else "reduce", function, owner, inputs, written=written)
    return here[own], here


def _add_up(owner: Device, n_parts: int, targets: Sequence[int], *values: torch.Tensor) -> None:
    n_arrays = len(values) // n_parts
    for first in range(n_arrays):
        sources = [values[first + n * n_arrays] for n in range(n_parts)]
        owner.fold(sources, [sources[n] for n in targets])


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
    brought = [s if device.reaches(s.place, s.dtype) else bring(s, device) for s in sources]
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
