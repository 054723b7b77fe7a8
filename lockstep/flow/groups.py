"""Several processes: a torch.distributed group's part in merging, and operations that send and receive."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UserError
from lockstep.flow import placement, private
from lockstep.flow.arrays import Array, from_tensor
from lockstep.flow.devices import Device
from lockstep.flow.operations import new, new_sparse, operation


class Processes:
    """A group of processes whose gradients are added up in one order, which edges fix.

    They follow from an array that each exchange writes. So all processes exchange bucket after bucket alike,
    whatever is ready first.
    """

    def __init__(self, group: Any, device: Device) -> None:
        check_distributed("group")
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._turn = _turn(device)

    def broadcast_model(self, model: nn.Module) -> None:
        """Gives all the values that the group's rank 0 has."""
        first = dist.get_global_rank(self._group, 0) if self._group is not dist.group.WORLD else 0
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, first, group=self._group)

    def gather(self, value: Any) -> list[Any]:
        """That of each process, in the order of ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce(self, arrays: Sequence[Array], device: Device) -> None:
        """Adds up arrays of all processes, in place."""
        inputs = [*arrays, self._turn]
        operation("all_reduce processes", self._add_up, device, inputs, written=inputs)

    def _add_up(self, *values: torch.Tensor) -> None:
        tensors = values[:-1]
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._group)
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def fold_gathered(
        self, fold: Callable[..., Any], inputs: Sequence[Array], made: Sequence[Array], device: Device
    ) -> None:
        """fold(values of all processes, in the order of ranks) makes the new arrays."""
        function = partial(self._fold_gathered, fold)
        operation(
            "all_reduce processes", function, device, [*inputs, self._turn], written=[self._turn], made=made
        )

    def _fold_gathered(self, fold: Callable[..., Any], *values: torch.Tensor) -> Any:
        return fold(*(value for own in self.gather(values[:-1]) for value in own))

    def reduce_sparse(self, array: Array, device: Device) -> Array:
        """All entries in the order of ranks, coalesced."""
        made = new_sparse(device, array)
        operation(
            "all_reduce processes",
            self._coalesce,
            device,
            [array, self._turn],
            written=[self._turn],
            made=[made],
        )
        return made

    def _coalesce(self, value: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        found = self.gather((value._indices(), value._values()))
        indices, entries = (
            torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (1, 0), strict=True)
        )
        return torch.sparse_coo_tensor(indices, entries, value.size(), check_invariants=False).coalesce()


def _turn(device: Device) -> Array:
    with private.without_modes():
        return from_tensor(torch.zeros(()), device, "turn")


def check_distributed(what: str) -> None:
    """Raises UserError before torch.distributed has begun."""
    if not dist.is_initialized():
        raise UserError(f"{what} needs other processes: call torch.distributed.init_process_group first")


_turns: dict[tuple[Any, ...], Array] = {}  # messages to a peer, and from it, keep their order


def _turn_of(kind: str, peer: int, group: Any, device: Device) -> Array:
    check_distributed(f"flow.{kind}")
    key = kind, peer, id(group)
    if key not in _turns:
        _turns[key] = _turn(device)
    return _turns[key]


def send(array: Array, peer: int, group: Any = None) -> Any:
    """Sends a value to the process with this rank. Returns the operation; it blocks a lane of its own only.

    peer: a global rank of torch.distributed. What one process sends to another arrives in program order.
    """
    turn = _turn_of("send", peer, group, array.place)
    message = partial(_send, peer, group)
    return operation("send", message, array.place, [array, turn], written=[turn], lane="send", phase="copy")


def receive(peer: int, like: torch.Tensor, group: Any = None) -> Array:
    """An array like `like`, on the current device, for what the process with this rank sends next."""
    device = placement.current_device()
    turn = _turn_of("receive", peer, group, device)
    made = new(device, like.shape, like.dtype, [like] if isinstance(like, Array) else [])
    message = _receiving(peer, group, like.shape, like.dtype)
    operation("receive", message, device, [turn], written=[turn], made=[made], lane="receive", phase="copy")
    return made


def _send(peer: int, group: Any, value: torch.Tensor, _turn: torch.Tensor) -> None:
    dist.send(value.contiguous(), peer, group=group)


def _receiving(peer: int, group: Any, shape: torch.Size, dtype: torch.dtype) -> Callable[..., Any]:
    def message(turn: torch.Tensor) -> tuple[torch.Tensor]:
        value = torch.empty(shape, dtype=dtype, device=turn.device)
        dist.recv(value, peer, group=group)
        return (value,)

    return message
