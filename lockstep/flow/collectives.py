"""Collectives: reductions and copies over devices, and over the processes of a torch.distributed group.

All values are combined in the order of devices and ranks, so that the bits are the same in every run.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UserError, first_line
from lockstep.flow import placement, private
from lockstep.flow.arrays import Array, bring
from lockstep.flow.creation import device as on_device
from lockstep.flow.devices import Device
from lockstep.flow.graph import Uses
from lockstep.flow.instructions import Storage
from lockstep.flow.lanes import Operation
from lockstep.flow.operations import new, new_sparse, operation

Parts = list[list[Array]]  # the arrays of a bucket, of each device with samples
_numbers = itertools.count()  # of the executors of this process


def reduce(parts: Parts, owner: Device, in_all: bool = False) -> tuple[list[Array], Parts]:
    """Add up dense arrays in place, on the owner.

    Inputs that the owner cannot reach are copied into its memory first.

    Args:
        parts: The arrays of each device.
        in_all: Write the sums into the arrays of all devices that the owner reaches.

    Returns:
        The sums, in the owner's memory, and the parts as used: originals, or copies on the owner.
    """
    own = next((n for n, part in enumerate(parts) if part[0].place.memory == owner.memory), None)
    if own is None:
        own, parts = 0, [[bring(array, owner) for array in parts[0]], *parts[1:]]
    reached = [
        part if all(owner.reaches(array.place, array.dtype) for array in part)
        else [bring(array, owner) for array in part]
        for part in parts
    ]  # fmt: skip
    if len(reached) > 1:
        targets = [own, *(n for n, part in enumerate(reached) if in_all and n != own and part is parts[n])]
        inputs = [array for part in reached for array in part]
        written = [array for n in targets for array in reached[n]]
        function = partial(_add_up, owner, len(reached), targets)
        operation("all_reduce" if in_all else "reduce", function, owner, inputs, written=written)
    return reached[own], reached


def _add_up(owner: Device, n_parts: int, targets: Sequence[int], *values: torch.Tensor) -> None:
    n_arrays = len(values) // n_parts
    for first in range(n_arrays):
        sources = [values[first + n * n_arrays] for n in range(n_parts)]
        owner.reduce(sources, [sources[n] for n in targets])


def reduce_sparse(parts: Parts, owner: Device) -> Array:
    """Return one sparse array with the entries of all devices in order; equal rows are added up."""
    inputs = [bring(part[0], owner) for part in parts]
    merged = new_sparse(owner, inputs[0])
    operation("reduce", _add_up_sparse, owner, inputs, made=[merged])
    return merged


def _add_up_sparse(*values: torch.Tensor) -> torch.Tensor:
    entries = [(value._indices(), value._values()) for value in values]
    return _coalesced(entries, values[0])


def _coalesced(parts: Sequence[Sequence[torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor like `like` of the (indices, values) of all parts, in their order."""
    indices, values = zip(*parts, strict=True)
    entries = torch.cat(indices, 1).to(like.device), torch.cat(values).to(like.device)
    return torch.sparse_coo_tensor(*entries, like.size(), check_invariants=False).coalesce()


def broadcast(sources: Sequence[Array], targets: Sequence[Array], device: Device) -> None:
    """Copy arrays into others, which are on the device."""
    brought = [s if device.reaches(s.place, s.dtype) else bring(s, device) for s in sources]
    operation("broadcast", _copy, device, [*brought, *targets], written=targets)


def _copy(*values: torch.Tensor) -> None:
    half = len(values) // 2
    for source, target in zip(values[:half], values[half:], strict=True):
        target.copy_(source)


def mean(parts: Parts, fractions: Sequence[Array], owner: Device) -> list[Array]:
    """Return new arrays: the means of the parts, weighted by scalar arrays."""
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


class ProcessCollectives:
    """Collectives among processes, which all processes run in the same order.

    Every exchange of a group writes its turn, so their hazards fix the order, whichever bucket is ready first
    and whichever executor makes it: an interrupted run may still be pending when another executor begins.
    """

    def __init__(self, group: Any, device: Device) -> None:
        check_distributed("group")
        if dist.get_rank(group) < 0:
            raise UserError("group: this process is not in it; only its members make an executor with it")
        self._group, self._device = group, device.torch_device
        self._on_gpus = dist.get_backend(group) == "nccl"  # which takes nothing of the host's memory
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._turn = _turn(device, group, "exchange")
        self._lane = f"processes {group.group_name}"  # a late process must not keep other groups waiting

    def forget_failure(self) -> None:
        """Let exchanges run again, whether or not an earlier failure was reported."""
        self._turn.zero_()

    def broadcast_model(self, replicas: Sequence[Any]) -> None:
        """Copy all values of the group's rank 0 into the replicas."""
        first = dist.get_global_rank(self._group, 0) if self._group is not dist.group.WORLD else 0
        variables = [replica.variables() for replica in replicas]
        for name, array in variables[0].items():
            with private.without_modes():
                sent = array.tensor().contiguous()  # what is sent is its memory
                sent = sent.to(self._device) if self._on_gpus else sent
                memory = sent.view(-1).view(torch.uint8)
                self._wait_for(partial(dist.broadcast, memory, first, group=self._group))
            for replica, own in zip(replicas, variables, strict=True):
                with private.no_grad(), on_device(replica.device):
                    own[name].detach().copy_(sent)

    def check_alike(self, replica: Any, settings: dict[str, Any]) -> None:
        """Raise UserError if another process has another model or settings: gloo aborts, or weights drift."""
        own = {name: _described(array) for name, array in replica.variables().items()} | settings
        others, numbers = zip(*self.gather("makes an executor", (own, next(_numbers))), strict=True)
        self._number = numbers[0]  # what rank 0 calls this executor
        for rank, other in enumerate(others):
            for name in {**own, **other}:
                here, there = own.get(name, "missing"), other.get(name, "missing")
                if here != there:
                    raise UserError(
                        f"group: {name} is {here} in this process and {there} in the group's process {rank}: "
                        "make the same executor in all processes"
                    )
            if list(other) != list(own):
                raise UserError(
                    "group: the model's parameters and buffers have another order in the group's process "
                    f"{rank}: register them in the same order (that of a set differs between processes)"
                )

    def gather_steps(self, n_samples: int, n_runs: int, merged: Any) -> list[int]:
        """Return the number of samples of each process in the next step.

        Args:
            n_runs: The number of steps before it.
            merged: The names of what it merges, by exchange, or None if they are not known yet.

        Raises:
            UserError: Another process is at another step, as after a state was loaded in some only, or runs
                another executor.
        """
        gathered = self.gather("begins a step", (n_samples, n_runs, merged, self._number))
        counts, runs, self._merged, numbers = zip(*gathered, strict=True)
        for rank, number in enumerate(numbers):
            if number != self._number:
                raise UserError(
                    f"group: this process and the group's process {rank} begin steps of different executors: "
                    "run them in the same order in all processes"
                )
        for rank, other in enumerate(runs):
            if other != n_runs:
                raise UserError(
                    f"group: {n_runs} steps lie behind this process and {other} behind the group's process "
                    f"{rank}: load the same state in all processes"
                )
        return list(counts)

    def report_failure(self, error: Exception) -> None:
        """Tell the processes that wait in check_merged that this one could not record the step."""
        with contextlib.suppress(RuntimeError, UserError):  # a peer may have ended; the caller raises `error`
            self.gather("records a step", f"{type(error).__name__}: {first_line(error)}")

    def check_merged(self, merged: Any) -> None:
        """Raise UserError if another process merges something else: gloo would abort, or mix them up."""
        others = self.gather("records a step", merged) if None in self._merged else self._merged
        for rank, other in enumerate(others):
            if isinstance(other, str):
                raise UserError(f"group: the step can't be recorded in the group's process {rank}: {other}")
            if other != merged:
                here, there = ({name for names in each for name in names} for each in (merged, other))
                what = ", ".join(sorted(here ^ there)) or "parameters in another order"
                raise UserError(
                    f"group: gradients reach {what}, or the loss writes it, in one of this process and the "
                    f"group's process {rank} only: let the loss use and write the same ones in all processes"
                )

    def gather(self, doing: str, value: Any) -> list[Any]:
        """Return the value of each process, in the order of ranks.

        Args:
            doing: What a process does that makes this exchange, in words.

        Raises:
            UserError: Another process is at another exchange, as after an interrupt.
        """
        found: list[tuple[str, Any]] = []
        self._wait_for(lambda: found.extend(self._gather((doing, value))))
        for rank, (other, _) in enumerate(found):
            if other != doing:
                raise UserError(
                    f"group: this process {doing} and the group's process {rank} {other}, as after an "
                    "interrupt: make executors with a new group and new devices in all processes"
                )
        return [theirs for _, theirs in found]

    def _wait_for(self, function: Callable[[], Any]) -> None:
        """Call a function that waits for the other processes, in its turn.

        A worker calls it: gloo's waits end at the group's timeout, and no signal interrupts them.
        """
        if self._on_gpus:  # the values of nccl are on this thread's current GPU
            function()
        else:
            self._exchange(lambda _turn: function(), self._turn.place, [], name="other processes").wait()

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with private.without_modes():  # which would make its buffers arrays inside of `with flow.device`
            dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce(self, arrays: Sequence[Array], device: Device) -> None:
        """Add up arrays over all processes, in place."""
        self._exchange(self._add_up, device, arrays, written=arrays)

    def _exchange(
        self,
        function: Callable[..., Any],
        device: Device,
        inputs: Sequence[Array],
        written: Sequence[Array] = (),
        made: Sequence[Array] = (),
        name: str = "all_reduce processes",
    ) -> Any:
        """Submit an exchange, in its turn. `function` gets the turn as its last argument."""
        return operation(
            name,
            function,
            device,
            [*inputs, self._turn],
            written=[*written, self._turn],
            made=made,
            lane=self._lane,
        )

    def _add_up(self, *values: torch.Tensor) -> None:
        tensors = values[:-1]
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._group)
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def reduce_gathered(
        self, combine: Callable[..., Any], inputs: Sequence[Array], made: Sequence[Array], device: Device
    ) -> None:
        """Make new arrays by combine(values of all processes, in the order of ranks)."""
        self._exchange(partial(self._reduce_gathered, combine), device, inputs, made=made)

    def _reduce_gathered(self, combine: Callable[..., Any], *values: torch.Tensor) -> Any:
        device = values[0].device
        gathered = self._gather([value.cpu() for value in values[:-1]])  # a GPU has another number elsewhere
        return combine(*(value.to(device) for own in gathered for value in own))

    def reduce_sparse(self, array: Array, device: Device) -> Array:
        """Return a sparse array with all entries in the order of ranks, coalesced."""
        made = new_sparse(device, array)
        self._exchange(self._add_up_sparse, device, [array], made=[made])
        return made

    def _add_up_sparse(self, value: torch.Tensor, _turn: torch.Tensor) -> torch.Tensor:
        return _coalesced(self._gather((value._indices().cpu(), value._values().cpu())), value)


def _described(array: Array) -> str:
    return f"{tuple(array.shape)} {array.dtype}" + (", trained" if array.requires_grad else "")


class Turn(Storage):
    """A memory that orders exchanges. Each reads and writes it, so the failure of one reaches those behind.

    Otherwise a peer would take a later value for the missing one. A failure that was reported reaches no
    further exchange.
    """

    __slots__ = ("_order",)

    def __init__(self, device: Device, order: Uses) -> None:
        self._order = Uses()  # of a new memory
        super().__init__(device, (torch.Size(()), (), torch.float32), "turn")
        self._order = order

    @property
    def writer(self) -> Any:
        """The newest exchange, or None if its failure was reported."""
        newest = self._order.writer
        return newest if newest is None or not newest.done or not _is_reported(newest) else None

    @writer.setter
    def writer(self, newest: Any) -> None:
        self._order.writer = newest

    @property
    def readers(self) -> list[Any]:
        """The operations that have read it since the newest exchange."""
        readers: list[Any] = self._order.readers
        return readers

    @readers.setter
    def readers(self, readers: list[Any]) -> None:
        self._order.readers = readers


def _is_reported(operation: Operation) -> bool:
    return operation.failure is not None and operation.failure.seen


# The order of a group's exchanges, and of the messages to each peer and from it: in all processes the same.
_orders = weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Uses]]()


def _turn(device: Device, group: Any, *what: Any) -> Array:
    """Return a turn. All turns of a group for the same thing share one order, on whichever devices."""
    orders = _orders.setdefault(group, {})
    turn = Turn(device, orders.setdefault(what, Uses()))  # another thread may have been first
    with private.without_modes():
        turn.cell.value = torch.zeros(())
    return Array(turn, torch.Size(()), (), 0, torch.float32)


def check_distributed(what: str) -> None:
    """Raise UserError if torch.distributed is not initialized."""
    if not dist.is_initialized():
        raise UserError(f"{what} needs other processes: call torch.distributed.init_process_group first")


def _order_of(kind: str, peer: int, group: Any, device: Device) -> tuple[Array, str]:
    """Return the turn and the lane of messages to or from a peer: others may have to arrive before these."""
    check_distributed(f"flow.{kind}")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise UserError(f"flow.{kind}: this process is not in the group; only its members send and receive")
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    if peer not in others:  # gloo crashes with an unknown rank
        raise UserError(f"flow.{kind}: peer is the rank of another process, one of {others}, not {peer!r}")
    return _turn(device, group, kind, peer), f"{kind} {peer} {group.group_name}"


def send(array: Array, peer: int, group: Any = None) -> Any:
    """Send a value to the process with this rank, and return the operation. Each peer has its own lane.

    Values from one process to another arrive in program order, each by a `receive` of the other process.

    Args:
        peer: A global rank of torch.distributed.
    """
    if not isinstance(array, Array):
        raise UserError(f"flow.send: {type(array).__name__} is not an array: flow.array makes one")
    if array.layout is not torch.strided:
        raise UserError("flow.send: a sparse array can't be sent: send to_dense()")
    turn, lane = _order_of("send", peer, group, array.place)
    message = partial(_send, peer, group)
    return operation("send", message, array.place, [array, turn], written=[turn], lane=lane, phase="copy")


def receive(peer: int, like: torch.Tensor, group: Any = None) -> Array:
    """Return an array like `like`, on the current device, for the next value from the process `peer`."""
    if not isinstance(like, torch.Tensor) or like.layout is not torch.strided:
        raise UserError("flow.receive: like is a dense tensor with the shape and dtype of the value")
    device = placement.current_device()
    turn, lane = _order_of("receive", peer, group, device)
    made = new(device, like.shape, like.dtype, [like] if isinstance(like, Array) else [])
    message = partial(_receive, peer, group, like.shape, like.dtype, device.torch_device)
    operation("receive", message, device, [turn], written=[turn], made=[made], lane=lane, phase="copy")
    return made


_HEADER_BYTES = 256  # before each value: its number of bytes, its shape and its dtype, in words
_TAG = int.from_bytes(b"fl")  # of messages: a lane may send or receive while the program does, with tag 0


def _header(value: torch.Tensor) -> torch.Tensor:
    words = f"{value.numel() * value.element_size()} {tuple(value.shape)} {value.dtype}".encode()
    padded = bytearray(words[:_HEADER_BYTES].ljust(_HEADER_BYTES))
    return torch.frombuffer(padded, dtype=torch.uint8).to(value.device)


def _send(peer: int, group: Any, value: torch.Tensor, _turn: torch.Tensor) -> None:
    whole = value.contiguous()  # if memory lacks for it, the peer must not get a header without its value
    dist.send(_header(whole), peer, group=group, tag=_TAG)
    dist.send(whole, peer, group=group, tag=_TAG)


def _receive(
    peer: int, group: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device, _turn: torch.Tensor
) -> tuple[torch.Tensor]:
    value = torch.empty(shape, dtype=dtype, device=device)
    header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=device)
    dist.recv(header, peer, group=group, tag=_TAG)
    if not torch.equal(header, _header(value)):  # gloo leaves a part of the value as it is, or aborts
        n_bytes, sent = bytes(header.tolist()).decode().split(maxsplit=1)
        dist.recv(torch.empty(int(n_bytes), dtype=torch.uint8, device=device), peer, group=group, tag=_TAG)
        raise UserError(
            f"flow.receive: process {peer} has sent {sent.strip()}, and `like` is {tuple(shape)} {dtype}"
        )
    dist.recv(value, peer, group=group, tag=_TAG)
    return (value,)
