"""How a bucket's gradients of all devices become those that its updates are given."""

import torch

from lockstep.flow import merge, private
from lockstep.flow.arrays import Array, from_tensor
from lockstep.flow.compress import BLOCK, Bits, Compression
from lockstep.flow.devices import Device
from lockstep.flow.groups import Processes
from lockstep.flow.operations import copied, new, operation, reshaped
from lockstep.flow.recording import device as on_device
from lockstep.flow.replicas import Bucket, Replica
from lockstep.flow.transfers import bring

Parts = dict[int, list[Array]]  # by the device's number


class Merger:
    """in_all: whether every device needs the merged gradients, or the bucket's owner alone."""

    def __init__(
        self, replicas: list[Replica], in_all: bool, bits: Bits | None, processes: Processes | None
    ) -> None:
        self._devices = [replica.device for replica in replicas]
        self._in_all, self._bits, self._processes = in_all, bits, processes
        self.alone = len(replicas) == 1 and processes is None
        self._carried: dict[str, Array] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def merge(self, bucket: Bucket, parts: Parts) -> Parts:
        """parts: of each device with samples. Returns those that each device with updates uses."""
        if next(iter(parts.values()))[0].layout is not torch.strided:
            return self._merge_sparse(bucket, parts)
        owner = self._devices[bucket.owner]
        here: Parts = {}
        if self._bits is not None and not self.alone:
            sums = self._compressed(bucket, parts)
        elif self._processes is None:
            sums, found = merge.reduce(list(parts.values()), owner, self._in_all)
            here = {d: part for d, part in zip(parts, found, strict=True) if part[0] is parts[d][0]}
        else:
            sums = merge.reduce(list(parts.values()), owner)[0]
            self._processes.all_reduce(sums, owner)
        if not self._in_all:
            return {bucket.owner: sums}
        return {d: here[d] if d in here else self._handed_over(sums, parts, d) for d in bucket.updates}

    def _handed_over(self, sums: list[Array], parts: Parts, number: int) -> list[Array]:
        """Copies that are the device's own: its optimizer may write them."""
        device, own = self._devices[number], parts.get(number)
        if own is None:
            with on_device(device):
                return [copied(array) for array in sums]
        if own[0] is not sums[0]:
            merge.broadcast(sums, own, device)
        return own

    def mean(self, parts: list[list[Array]], fractions: list[Array], device: Device) -> list[Array]:
        """New arrays: means over all samples of all processes. parts: of each device with samples."""
        means = merge.mean(parts, fractions, device)
        if self._processes is not None:
            self._processes.all_reduce(means, device)
        return means

    def _merge_sparse(self, bucket: Bucket, parts: Parts) -> Parts:
        owner = self._devices[bucket.owner]
        merged = merge.reduce_sparse(list(parts.values()), owner)
        if self._processes is not None:
            merged = self._processes.reduce_sparse(merged, owner)
        return {d: [bring(merged, self._devices[d])] for d in {*bucket.updates, bucket.owner}}

    def _compressed(self, bucket: Bucket, parts: Parts) -> list[Array]:
        """New arrays on the owner: sums of what was compressed on each device."""
        assert self._bits is not None
        owner, gradients = self._devices[bucket.owner], next(iter(parts.values()))
        compression = Compression(self._bits, tuple(array.numel() for array in gradients))
        received: list[Array] = []
        for number, part in parts.items():
            device, carried = (
                self._devices[number],
                self._carried_by(number, bucket.names[0], compression, part),
            )
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
            self._processes.fold_gathered(compression.add_up, received, sums, owner)
        with on_device(owner):
            return [reshaped(flat, array) for flat, array in zip(sums, gradients, strict=True)]

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
        """What is carried, by device and bucket."""
        return {key: array.tensor() for key, array in self._carried.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self._loaded = dict(state)
        for key, array in self._carried.items():
            value = state.get(key)
            if value is None or value.shape != array.shape:
                value = torch.zeros(array.shape)
            with on_device(array.place):
                array.copy_(value)
