"""The same network on several devices, and the optimizers of its parameters there."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError, nearest
from lockstep.flow import placement, private
from lockstep.flow.arrays import Array, arrays
from lockstep.flow.devices import Device
from lockstep.flow.recording import device as on_device
from lockstep.network import dropout

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Replica:
    """The network on one device. parameters, buffers: by name; those that are one tensor have one name."""

    device: Device
    model: nn.Module
    dropouts: list[dropout.SampleDropout]
    parameters: dict[str, Any] = field(init=False)
    buffers: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())
        self.buffers = dict(self.model.named_buffers())

    def variables(self) -> dict[str, Any]:
        return {**self.parameters, **self.buffers}


def start_up(model: nn.Module, devices: Sequence[Device], share_weights: bool) -> list[Replica]:
    """A copy of the model on the first device, broadcast to the others.

    share_weights: devices with one memory have one copy of the parameters; buffers are always their own.
    """
    model = copy.deepcopy(model)
    dropouts = dropout.install(model)
    with placement.on(devices[0]):
        replicas = [Replica(devices[0], arrays(model), dropouts)]
    for device in devices[1:]:
        memo: dict[int, Any] = {}
        for other in replicas:
            if share_weights and other.device.memory == device.memory:
                pairs = zip(replicas[0].parameters.values(), other.parameters.values(), strict=True)
                memo = {id(first): _shared(own) for first, own in pairs}
                break
        with on_device(device):
            copied = copy.deepcopy(replicas[0].model, memo)
        found = [each for each in copied.modules() if isinstance(each, dropout.SampleDropout)]
        replicas.append(Replica(device, copied, found))
        for name, array in replicas[-1].variables().items():
            array.memory.name = array.memory.name or name
    return replicas


def _shared(parameter: Array) -> Array:
    """Another leaf of autograd's on the same memory."""
    made: Any = private.as_parameter(parameter.detach().requires_grad_(parameter.requires_grad))
    return made  # type: ignore[no-any-return]


class Updates:
    """The optimizer of a bucket's parameters on one device: one of torch's, on their memory."""

    def __init__(self, names: Sequence[str], replica: Replica, make: MakeOptimizer) -> None:
        self.names, self.replica = list(names), replica
        self._own = []
        with private.without_modes():
            for name in names:
                array = replica.parameters[name].wait()
                value = array.memory.cell.view(array.view_of_memory())
                self._own.append(nn.Parameter(value))
            self.optimizer = make(list(self._own))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer(parameters) makes a torch.optim.Optimizer, not {type(self.optimizer).__name__}"
            )

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """values: the gradients, in the order of the names."""
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient
        self.optimizer.step()
        for own in self._own:
            own.grad = None

    def set_hyperparameters(self, values: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group.update(values)

    def state(self) -> dict[str, Any]:
        """Of each parameter by name: its state, and the hyper-parameters of its group."""
        found = self.optimizer.state_dict()
        made = {}
        for group in found["param_groups"]:
            values = {key: value for key, value in group.items() if key != "params"}
            for number in group["params"]:
                own = found["state"].get(number, {})
                made[self.names[number]] = {"state": _copied(own), "hyperparameters": dict(values)}
        return made

    def load_state(self, state: dict[str, Any]) -> None:
        """Of what `state` gave, for other buckets maybe, that of these parameters."""
        groups = self.optimizer.state_dict()["param_groups"]
        own = {n: state[name] for n, name in enumerate(self.names) if name in state}
        for group in groups:
            for number in group["params"][:1]:
                group.update(own[number]["hyperparameters"] if number in own else {})
        states = {n: _copied(each["state"]) for n, each in own.items() if each["state"]}
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}


@dataclass
class Bucket:
    """Gradients that are merged together. owner: the number of the device that adds them up."""

    names: list[str]
    owner: int
    updates: dict[int, Updates]  # by the device's number


class Buckets:
    """All of them, closed in the order in which gradients complete.

    Each has the owner with least bytes so far, the first of equals; with `owner_updates` that one alone has
    an optimizer for it.
    """

    def __init__(
        self, replicas: Sequence[Replica], make: MakeOptimizer, n_bytes: int, owner_updates: bool
    ) -> None:
        self.all: list[Bucket] = []
        self._replicas, self._make, self._n_bytes = replicas, make, n_bytes
        self._owner_updates = owner_updates
        self._owned = [0] * len(replicas)
        self._hyperparameters: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def extend(self, gradients: dict[str, Array]) -> None:
        """Parameters that are in no bucket yet get new ones. gradients: in the order of completion."""
        known = {name for bucket in self.all for name in bucket.names}
        names: list[str] = []
        size = 0
        for name, gradient in gradients.items():
            if name in known:
                continue
            if gradient.layout is not torch.strided:
                self._close([name], 0)
                continue
            names.append(name)
            size += gradient.numel() * gradient.element_size()
            if size >= self._n_bytes:
                self._close(names, size)
                names, size = [], 0
        if names:
            self._close(names, size)

    def _close(self, names: list[str], size: int) -> None:
        owner = self._owned.index(min(self._owned))
        self._owned[owner] += size
        devices = [owner] if self._owner_updates else range(len(self._replicas))
        updates = {d: Updates(names, self._replicas[d], self._make) for d in devices}
        with private.without_modes():
            for each in updates.values():
                each.load_state(self._loaded)
                each.set_hyperparameters(self._hyperparameters)
        self.all.append(Bucket(list(names), owner, updates))

    def set_hyperparameters(self, values: dict[str, Any]) -> None:
        with private.without_modes():  # there may be no bucket yet
            optimizer = self._make([nn.Parameter(torch.zeros(1))])
        known = [key for key in optimizer.param_groups[0] if key != "params"]
        for name in values:
            if name not in known:
                kind, there = type(optimizer).__name__, ", ".join(known)
                raise UserError(f"{kind} has no {name}{nearest(name, known)} (it has: {there})")
        for bucket in self.all:
            for updates in bucket.updates.values():
                updates.set_hyperparameters(values)
        self._hyperparameters.update(values)

    def n_bytes_of_state(self) -> int:
        states = [u.optimizer.state.values() for bucket in self.all for u in bucket.updates.values()]
        tensors = [value for each in states for own in each for value in own.values()]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def state(self) -> dict[str, Any]:
        made = dict(self._loaded)
        for bucket in self.all:
            made.update(bucket.updates[min(bucket.updates)].state())
        return made

    def load_state(self, state: dict[str, Any]) -> None:
        self._loaded, self._hyperparameters = dict(state), {}
        for bucket in self.all:
            for updates in bucket.updates.values():
                updates.load_state(state)
