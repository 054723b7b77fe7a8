"""Copies of the state of training in a memory file, which outlives the trainer that writes it.

The file has slots of equal size, which are written in turn, so that one is whole at any moment. A slot holds
the checkpoint's tensors, and behind them a JSON record of where they lie and of everything else that a
checkpoint on disk has. Trainer 0 writes and the launcher holds the descriptor (`MemoryCheckpoint`).
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.errors import UserError
from lockstep.memory.digest import digest_of
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.runs.state import State

if TYPE_CHECKING:  # the launcher reads records, without importing torch
    import torch

    from lockstep.network.arena import Arena

_ALIGNMENT = 64  # bytes; every tensor starts on a cache line
_RECORD_BYTES = 1 << 20  # room for a record without the places of its tensors, and with some validations
_VALIDATION_BYTES = 256  # room for each further validation in a record
_MOST_VALIDATIONS = 20_000  # that get room: n_epochs may be any number, for a run that patience ends
_MOST_KINDS = 4  # of a rule's tensors, each with at most as many as the arena
_PLACE_BYTES = 512  # room for the place of a tensor in a record


@dataclass(frozen=True)
class MemoryCheckpoint:
    """Trainer 0 to the launcher: a slot holds a whole checkpoint.

    Attributes:
        n_bytes: Of the tensors; the record follows them.
        digest: Of tensors and record.
        moment: The epoch, the position in it and the number of validations so far, which tell it from others.
        to_disk: Whether the trainer then writes it to the disk, too.
    """

    slot: int
    n_bytes: int
    n_record_bytes: int
    digest: str
    moment: tuple[int, ...]
    to_disk: bool = False


@dataclass(frozen=True)
class SnapshotMemory:
    """Trainer 0 to the launcher: the memory file for its checkpoints; the file's descriptor follows."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a slot: the name of its dtype, shape, strides in elements, offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Retained:
    """A memory checkpoint and the memory file that has it, from which a run can resume."""

    block: HostBlock
    checkpoint: MemoryCheckpoint
    n_slots: int = 2

    def is_whole(self) -> bool:
        """Return whether the digest of the slot is the recorded one."""
        return digest_of(self._bytes()) == self.checkpoint.digest

    def state(self) -> State:
        """Return everything but the tensors."""
        return State(**self._record()["state"])

    def tensors(self) -> dict[str, "torch.Tensor"]:
        """Return the tensors by name, as views of the memory file."""
        content = self._bytes()
        return {name: _at(content, Place(**place)) for name, place in self._record()["places"].items()}

    def _bytes(self) -> np.ndarray:
        size = self.block.n_bytes // self.n_slots
        n_bytes = self.checkpoint.n_bytes + self.checkpoint.n_record_bytes
        return self.block.array(np.uint8, (n_bytes,), self.checkpoint.slot * size)

    def _record(self) -> dict[str, dict[str, Any]]:
        record: dict[str, dict[str, Any]] = json.loads(bytes(self._bytes()[self.checkpoint.n_bytes :]))
        return record


class Snapshots:
    """Trainer 0's side: the slots and the copies into them.

    Args:
        arena: The trainer's.
        rule_bytes: Bytes of the rule's tensors in a checkpoint.
        n_replicas: Replicas of the arena among them.
        n_slots: 2, or 1 if no copy has to survive while another one is made.
        n_validations: Validations of the whole run, which every record has so far.
        retained: The checkpoint from which this trainer resumed; its memory is used again if it fits.

    Raises:
        UserError: There is too little memory.
    """

    def __init__(
        self,
        arena: "Arena",
        rule_bytes: int,
        n_slots: int,
        n_replicas: int = 0,
        n_validations: int = 0,
        retained: Retained | None = None,
    ) -> None:
        self._arena, self.n_slots = arena, n_slots
        n_tensors = (_MOST_KINDS + n_replicas) * len(arena.state())
        outside = sum(tensor.nbytes for tensor in arena.outside().values())
        n_bytes = arena.flat.nbytes + outside + rule_bytes
        room = n_bytes + n_tensors * (_ALIGNMENT + _PLACE_BYTES) + _RECORD_BYTES
        room += _VALIDATION_BYTES * min(n_validations, _MOST_VALIDATIONS)
        self._slot_bytes = -(-room // _ALIGNMENT) * _ALIGNMENT
        self.is_new = retained is None or retained.block.n_bytes != n_slots * self._slot_bytes
        if retained and not self.is_new:
            self.block, self.newest = retained.block, retained.checkpoint.slot
        else:
            self.block, self.newest = _allocate(n_slots * self._slot_bytes, n_slots), n_slots - 1
        arena.memory.lock(self.block)
        self._flats = [self._flat(slot) for slot in range(n_slots)]
        self._places: dict[str, Place] = {}

    def copy(self, others: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Copy the arena and other tensors into the slot that is not the newest one, which it becomes.

        A GPU copies in its stream, after the work that was asked for before, and this does not wait for it.

        Returns:
            The copies, by name.
        """
        self.newest = (self.newest + 1) % self.n_slots
        content, flat = self._content(self.newest), self._flats[self.newest]
        flat.copy_(self._arena.flat, non_blocking=True)
        copies = self._arena.views_of_all(flat)
        begin, end = self.newest * self._slot_bytes, flat.nbytes
        for name, value in others.items():
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            assert end + value.nbytes <= self._slot_bytes, "the tensors of the rule do not fit into a slot"
            copies[name] = self.block.tensor(value.dtype, tuple(value.shape), begin + end)
            copies[name].copy_(value, non_blocking=True)
            end += value.nbytes
        self._n_bytes = end
        self._places = {name: _place_of(view, content) for name, view in copies.items()}
        return copies

    def complete(self, state: State, to_disk: bool = False) -> MemoryCheckpoint:
        """Write the record of the newest slot behind its tensors, and return its description."""
        places = {name: dataclasses.asdict(place) for name, place in self._places.items()}
        record = json.dumps({"state": dataclasses.asdict(state), "places": places}).encode()
        end = self._n_bytes + len(record)
        if end > self._slot_bytes:
            raise UserError(
                f"the record of the memory checkpoint has {len(record):,} bytes, too many for its memory: "
                "set memory_checkpoint_seconds: null"
            )
        content = self._content(self.newest)
        content[self._n_bytes : end] = np.frombuffer(record, np.uint8)
        digest = digest_of(content[:end])
        return MemoryCheckpoint(self.newest, self._n_bytes, len(record), digest, state.moment, to_disk)

    @property
    def flat(self) -> "torch.Tensor":
        """The newest copy of the arena, (n,)."""
        return self._flats[self.newest]

    def _content(self, slot: int) -> np.ndarray:
        return self.block.array(np.uint8, (self._slot_bytes,), slot * self._slot_bytes)

    def _flat(self, slot: int) -> "torch.Tensor":
        flat = self._arena.flat
        return self.block.tensor(flat.dtype, tuple(flat.shape), slot * self._slot_bytes)


def _allocate(n_bytes: int, n_slots: int) -> HostBlock:
    try:
        block = HostMemory().allocate(n_bytes, "copies of the weights, for checkpoints")
    except UserError as error:
        if n_slots == 1:
            raise
        raise UserError(
            f"{error} Or set memory_checkpoint_seconds: null, which needs a single copy."
        ) from error
    block.array(np.uint8, (n_bytes,))[::4096] = 0  # so the first copy causes no page faults
    return block


def _place_of(view: "torch.Tensor", content: np.ndarray) -> Place:
    offset = view.data_ptr() - content.ctypes.data
    return Place(str(view.dtype).removeprefix("torch."), tuple(view.shape), view.stride(), offset)


def _at(content: np.ndarray, place: Place) -> "torch.Tensor":
    """Return the tensor at a place of a slot's bytes, without a copy."""
    import torch

    dtype = getattr(torch, place.dtype)
    n_bytes = math.prod(place.shape) * dtype.itemsize
    raw = torch.from_numpy(content[place.offset : place.offset + n_bytes])
    return raw.view(dtype).as_strided(tuple(place.shape), tuple(place.stride))
