"""Merging of gradients from several devices, in full precision or compressed.

A compressed gradient has 8 or 4 bits per element while it is merged. Blocks of 256 elements share a scale.
Rounding errors are carried to the next step, as in the error feedback of 1-bit SGD (Seide et al. 2014).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.flow import private
from lockstep.flow.arrays import Array, bring, from_tensor
from lockstep.flow.collectives import ProcessCollectives, broadcast, mean, reduce, reduce_sparse
from lockstep.flow.creation import device as on_device
from lockstep.flow.devices import Device
from lockstep.flow.operations import new, operation
from lockstep.flow.replicas import Bucket, ModelReplica

DeviceParts = dict[int, list[Array]]  # the arrays of a bucket, by the device's number
BLOCK = 256  # elements with one scale
Bits = Literal["int8", "int4"]
_LARGEST: dict[Bits, int] = {"int8": 127, "int4": 7}


@dataclass(frozen=True)
class Compression:
    """The conversion of a bucket's gradients to integers and back.

    Attributes:
        sizes: Elements of each gradient.
    """

    bits: Bits
    sizes: tuple[int, ...]

    @property
    def n_blocks(self) -> int:
        """The number of blocks, the last of which may be padded."""
        return -(-sum(self.sizes) // BLOCK)

    @property
    def n_bytes(self) -> int:
        """Bytes of the integers."""
        return self.n_blocks * (BLOCK if self.bits == "int8" else BLOCK // 2)

    def compress(self, *values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8 (n_bytes,) and scales (n_blocks,).

        Args:
            values: The gradients, and the carried errors, (n_blocks, BLOCK), which are replaced.
        """
        *gradients, carried = values
        flat = torch.cat([gradient.reshape(-1).to(carried.dtype) for gradient in gradients])
        carried.view(-1)[: len(flat)] += flat
        largest = _LARGEST[self.bits]
        scales = carried.abs().amax(1) / largest
        integers = (carried / torch.where(scales == 0, 1, scales)[:, None]).round_()
        integers.clamp_(-largest, largest)  # a scale that was rounded down, as in bfloat16, makes larger ones
        carried -= integers * scales[:, None]
        numbers = integers.to(torch.int8).view(-1)
        if self.bits == "int8":
            return numbers.view(torch.uint8), scales
        nibbles = (numbers + 8).view(torch.uint8)
        return nibbles[::2] | nibbles[1::2] << 4, scales

    def expand(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return (n_blocks * BLOCK,) numbers of the scales' dtype."""
        if self.bits == "int8":
            integers = numbers.view(torch.int8)
        else:
            integers = torch.stack([numbers & 15, numbers >> 4], 1).view(-1).to(torch.int8) - 8
        return (integers.view(-1, BLOCK).to(scales.dtype) * scales[:, None]).view(-1)

    def add_up(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sums, flat, one per gradient, from the numbers and scales of each device."""
        total = self.expand(values[0], values[1])
        for first in range(2, len(values), 2):
            total += self.expand(values[first], values[first + 1])
        parts: Sequence[torch.Tensor] = torch.split(total[: sum(self.sizes)], list(self.sizes))
        return tuple(part.clone() for part in parts)


class GradientMerger:
    """Merges gradients for every device (`in_all`), or for the bucket's owner only."""

    def __init__(
        self,
        replicas: list[ModelReplica],
        in_all: bool,
        bits: Bits | None,
        processes: ProcessCollectives | None,
    ) -> None:
        self._devices = [replica.device for replica in replicas]
        self._in_all, self._bits, self._processes = in_all, bits, processes
        self.has_processes = processes is not None
        self.is_single = len(replicas) == 1 and processes is None
        self._carried: dict[str, Array] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def merge(self, bucket: Bucket, names: Sequence[str], parts: DeviceParts) -> DeviceParts:
        """Merge the gradients of the devices with samples, and return those of the devices with updates.

        Args:
            names: The parameters of the bucket that have a gradient in this step.
        """
        if next(iter(parts.values()))[0].layout is not torch.strided:
            return self._merge_sparse(bucket, parts)
        owner = self._devices[bucket.owner]
        in_place: DeviceParts = {}
        if self._bits is not None and not self.is_single:
            sums = self._compressed(bucket, names, parts)
        elif self._processes is None:
            sums, found = reduce(list(parts.values()), owner, self._in_all)
            in_place = {d: part for d, part in zip(parts, found, strict=True) if part[0] is parts[d][0]}
        else:
            sums = reduce(list(parts.values()), owner)[0]
            self._processes.all_reduce(sums, owner)
        if not self._in_all:
            return {bucket.owner: sums}
        return {d: in_place[d] if d in in_place else self._copies(sums, parts, d) for d in bucket.updates}

    def _copies(self, sums: list[Array], parts: DeviceParts, number: int) -> list[Array]:
        """Return a device's own copies of the sums, which its optimizer may write."""
        device, own = self._devices[number], parts.get(number)
        if own is None:
            with on_device(device):
                return [array.clone() for array in sums]  # type: ignore[misc]
        if own[0] is not sums[0]:
            broadcast(sums, own, device)
        return own

    def mean(self, parts: list[list[Array]], fractions: list[Array], device: Device) -> list[Array]:
        """Return new arrays: the means over all samples of all processes."""
        means = mean(parts, fractions, device)
        if self._processes is not None:
            self._processes.all_reduce(means, device)
        return means

    def _merge_sparse(self, bucket: Bucket, parts: DeviceParts) -> DeviceParts:
        owner = self._devices[bucket.owner]
        merged = reduce_sparse(list(parts.values()), owner)
        if self._processes is not None:
            merged = self._processes.reduce_sparse(merged, owner)
        return {d: [bring(merged, self._devices[d])] for d in {*bucket.updates, bucket.owner}}

    def _compressed(self, bucket: Bucket, names: Sequence[str], parts: DeviceParts) -> list[Array]:
        """Return new arrays on the owner: sums of the compressed gradients of each device."""
        assert self._bits is not None
        owner, gradients = self._devices[bucket.owner], next(iter(parts.values()))
        compression = Compression(self._bits, tuple(array.numel() for array in gradients))
        # A step whose gradients reach a part of the bucket has rounding errors of its own, and so has a
        # resumed executor whose gradients complete in another order.
        key = "+".join(names)
        received: list[Array] = []
        for number, part in parts.items():
            device, carried = self._devices[number], self._carried_by(number, key, compression, part)
            made = [
                new(device, [compression.n_bytes], torch.uint8, part),
                new(device, [compression.n_blocks], part[0].dtype, part),
            ]
            inputs = [*part, carried]
            operation("compress", compression.compress, device, inputs, written=[carried], made=made)
            received += [bring(array, owner) for array in made]
        sums = [new(owner, [array.numel()], array.dtype, received) for array in gradients]
        if self._processes is None:
            operation("reduce", compression.add_up, owner, received, made=sums)
        else:
            self._processes.reduce_gathered(compression.add_up, received, sums, owner)
        with on_device(owner):
            return [flat.view(array.shape) for flat, array in zip(sums, gradients, strict=True)]  # type: ignore[misc]

    def _carried_by(self, number: int, name: str, compression: Compression, part: list[Array]) -> Array:
        key = f"{number}/{name}"
        if key not in self._carried:
            shape = torch.Size([compression.n_blocks, BLOCK])
            value = self._loaded.get(key)
            with private.without_modes():
                if value is None or value.shape != shape:
                    value = torch.zeros(shape, dtype=part[0].dtype)
            self._carried[key] = from_tensor(value, self._devices[number], f"carried {name}")
        return self._carried[key]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the carried rounding errors, by device and the parameters merged together."""
        unused = {key: value.clone() for key, value in self._loaded.items()}  # no step has needed them yet
        return unused | {key: array.tensor() for key, array in self._carried.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore rounding errors. Errors that the state lacks, or of another shape, become 0."""
        self._loaded = dict(state)
        for key, array in self._carried.items():
            value = state.get(key)
            if value is None or value.shape != array.shape:
                value = torch.zeros(array.shape)
            with on_device(array.place):
                array.copy_(value)
