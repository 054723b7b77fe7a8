"""Copies of one network on several devices, and the optimizers of their parameters."""

import contextlib
import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.errors import UserError, nearest
from lockstep.flow import graph, placement, private
from lockstep.flow.arrays import Array
from lockstep.flow.creation import arrays, check_tensors, tensors_of
from lockstep.flow.creation import device as on_device
from lockstep.flow.devices import Device
from lockstep.flow.engine import engine_of
from lockstep.network import dropout

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class ModelReplica:
    """The network on one device. `parameters` and `buffers` have each tensor once, by name.

    Attributes:
        restored: Locked while the changes of a call are being undone.
        first_writes: Names of what calls before a capture have written, by function, until it is recorded.
        undone: Names of what only such a call has written, so that no program has these values.
    """

    device: Device
    model: nn.Module
    dropouts: list[dropout.SampleDropout]
    parameters: dict[str, Any] = field(init=False)
    buffers: dict[str, Any] = field(init=False)
    restored: threading.Lock = field(init=False, default_factory=threading.Lock)
    first_writes: dict[Any, set[str]] = field(init=False, default_factory=dict)
    undone: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())
        self.buffers = dict(self.model.named_buffers())

    def variables(self) -> dict[str, Any]:
        """Return parameters and buffers by name."""
        return {**self.parameters, **self.buffers}

    def state(self) -> dict[str, Any]:
        """Return the module's state_dict: persistent arrays, tied ones by every name, and extra state."""
        with private.without_modes():  # tensors that get_extra_state makes are ordinary ones
            return self._with_values(self.model.state_dict(keep_vars=True))

    def _with_values(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a module has by name, without what a refused function has put in the places of others.

        A parameter that a function has made is refused, so those that are trained stay the executor's.
        """
        known, made = {id(own) for own in self.parameters.values()}, {}
        for name, value in found.items():
            lost = isinstance(value, Array) and value.memory.program is not None
            own = self.parameters.get(name, self.buffers.get(name, value) if lost else value)
            if not isinstance(own, Array) or not isinstance(own, nn.Parameter) or id(own) in known:
                made[name] = own
        return made

    def saved(self) -> dict[str, Any]:
        """Return copies of `state`, one for all names of an array."""
        memo: dict[int, Any] = {}
        with private.without_modes():
            return {name: _saved(value, memo) for name, value in self.state().items()}

    def copies(self) -> dict[str, Any]:
        """Return copies of parameters and buffers by name, also of buffers that the loss has made."""
        present = self._with_values(dict([*self.model.named_parameters(), *self.model.named_buffers()]))
        with private.without_modes():
            return {name: _saved(value, {}) for name, value in present.items()}

    def load(self, given: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        state = self.state()
        with private.no_grad(), on_device(self.device):
            for name, value in state.items():
                if isinstance(value, Array):
                    value.detach().copy_(given[name])
        extra = {name: given[name] for name, value in state.items() if not isinstance(value, Array)}
        if extra:
            with private.without_modes():
                self.model.load_state_dict(copy.deepcopy(extra), strict=False)


def load_all(replicas: Sequence[ModelReplica], given: Mapping[str, Any]) -> None:
    """Restore what `saved` returned on all devices.

    Buffers that no state has, and that a failed run should have written, keep what is in the first device's
    memory: as after an exception in eager torch.
    """
    saved = {id(value) for value in replicas[0].state().values()}
    for name, first in replicas[0].buffers.items():
        if id(first) in saved:
            continue
        own = [replica.buffers[name] for replica in replicas]
        writers = [writer for each in own if (writer := graph.writer_of(each.memory)) is not None]
        for writer in writers:
            writer.wait_done()
        if any(writer.failure is not None for writer in writers):
            for each in own:
                each.copy_(first.memory.cell.value)
    for replica in replicas:
        replica.load(given)


def _saved(value: Any, memo: dict[int, Any]) -> Any:
    """Return an array's value, the same tensor for all its names, or a copy of a module's extra state."""
    if not isinstance(value, Array):
        return copy.deepcopy(value)
    if id(value) not in memo:
        memo[id(value)] = value.tensor()
    return memo[id(value)]


def make_replicas(model: nn.Module, devices: Sequence[Device], share_weights: bool) -> list[ModelReplica]:
    """Return a copy of the model on the first device, and copies of that on the others.

    Args:
        share_weights: Devices with one memory share the parameters; each has its own buffers.
    """
    check_tensors(tensors_of(model), "change gradients in the optimizer instead")
    engine_of(devices[0])
    with placement.CurrentDevice(devices[0]):  # the copies of arrays lie there, too
        copied = _copy(model, {})
        _copy_marks(model.parameters(), copied)
        dropouts = dropout.install(copied)
        replicas = [ModelReplica(devices[0], arrays(copied), dropouts)]
    for device in devices[1:]:
        memo: dict[int, Any] = {}
        for other in replicas:
            if share_weights and other.device.memory == device.memory:
                pairs = zip(replicas[0].parameters.values(), other.parameters.values(), strict=True)
                memo = {id(first): _shared(own) for first, own in pairs}
                break
        with placement.CurrentDevice(device):  # the model's ordinary tensors stay so, as in the first copy
            copied = _copy(replicas[0].model, memo)
        if any(isinstance(each, torch.Generator) for each in memo.values()):
            raise UserError(
                "model can't be copied to the devices: it has a torch.Generator, whose copies would draw "
                "the same numbers. Let it draw from torch's own, or use one device"
            )
        _copy_marks(replicas[0].model.parameters(), copied)
        found = [each for each in copied.modules() if isinstance(each, dropout.SampleDropout)]
        replicas.append(ModelReplica(device, copied, found))
        for name, array in replicas[-1].variables().items():
            array.memory.name = array.memory.name or name
    return replicas


def _copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, SystemError) as error:  # not what a signal's handler raises
        raise UserError(f"model can't be copied to the devices: {error}") from error


def _copy_marks(originals: Iterable[nn.Parameter], copied: nn.Module) -> None:
    """Give the copies of parameters their originals' marks, such as `no_decay`, for the optimizer to see."""
    for original, own in zip(originals, copied.parameters(), strict=True):
        vars(own).update(private.marks(original))


def _shared(parameter: Array) -> Array:
    """Return another leaf for autograd on the same memory."""
    made: Any = private.as_parameter(parameter.detach().requires_grad_(parameter.requires_grad))
    return made  # type: ignore[no-any-return]


class BucketOptimizer:
    """The torch optimizer of a bucket's parameters on one device."""

    def __init__(self, names: Sequence[str], replica: ModelReplica, make: MakeOptimizer) -> None:
        self.names, self.replica = list(names), replica
        self._own: list[nn.Parameter] = []
        self._places: list[torch.Tensor] = []
        self._has_stepped = False
        with private.without_modes():
            for name in names:
                array = replica.parameters[name].wait()
                self._places.append(array.memory.cell.view(array.view_of_memory()))
                self._own.append(nn.Parameter(self._places[-1]))
                vars(self._own[-1]).update(private.marks(array))
            self.optimizer = make(list(self._own))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer(parameters) makes a torch.optim.Optimizer, not {type(self.optimizer).__name__}"
            )
        _check_step(self.optimizer)

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Update with gradients in the order of the names; None leaves a parameter as it is."""
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient if gradient is None else _laid_out_as(own, gradient)
        with contextlib.nullcontext() if self._has_stepped else private.refusing_random(self._refuse):
            self.optimizer.step()
        self._has_stepped = True
        for own, place in zip(self._own, self._places, strict=True):
            own.grad = None
            if not own.is_set_to(place):  # after `p.data = ...` in the step
                place.copy_(own.detach())
                own.data = place

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"{type(self.optimizer).__name__}.step draws random numbers from torch's own generator, so "
            "devices would differ: give it a torch.Generator that optimizer(parameters) makes and seeds"
        )

    def state(self) -> dict[str, Any]:
        """Return the state and the hyperparameters of each parameter, by name.

        Raises:
            UserError: The optimizer has state of no parameter, which other buckets could not take over.
        """
        found, names = self.optimizer.state_dict(), self._names_by_number()
        other = [key for key in found if key not in ("state", "param_groups")]
        other += [key for key in found.get("state", ()) if key not in range(len(names))]
        if other:
            raise UserError(
                f"optimizer: {type(self.optimizer).__name__} keeps state of no parameter ({other[0]!r}), "
                "which can't be saved: let it keep this in the state of each parameter"
            )
        made = {}
        for group in found["param_groups"]:
            values = {key: value for key, value in group.items() if key != "params"}
            for number in group["params"]:
                own = found["state"].get(number, {})
                made[names[number]] = {"state": _copied(own), "hyperparameters": _copied(values)}
        return made

    def _names_by_number(self) -> list[str]:
        """Return the parameters' names in the order in which torch numbers them: group by group."""
        names = {id(own): name for own, name in zip(self._own, self.names, strict=True)}
        return [names.get(id(own), self.names[n]) for n, own in enumerate(self._numbered())]  # or copies

    def _numbered(self) -> list[torch.Tensor]:
        return [own for group in self.optimizer.param_groups for own in group["params"]]

    def check_parameters(self, model: nn.Module) -> None:
        """Raise UserError for an optimizer of the user's model, which no step changes, or of others.

        It may have copies of the parameters that it was given, in their order.
        """
        numbered, theirs = self._numbered(), {id(parameter) for parameter in model.parameters()}
        if any(id(own) in theirs for own in numbered):
            raise UserError(
                "optimizer(parameters) has the parameters of the model itself, and the devices train copies: "
                "let it use the parameters that it is given"
            )
        given = {id(own) for own in self._own}
        shapes = [own.shape for own in self._own]
        for n, own in enumerate(numbered):
            if id(own) not in given and [own.shape] != shapes[n : n + 1]:
                raise UserError(
                    f"optimizer(parameters) has a parameter of shape {tuple(own.shape)} that it was not "
                    "given: make it a part of the model, such as an nn.ModuleDict of a network and its loss"
                )

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore these parameters' part of `state`, which other buckets may have returned."""
        groups = self.optimizer.state_dict()["param_groups"]
        own = {n: state[name] for n, name in enumerate(self._names_by_number()) if name in state}
        for group in groups:
            known = [own[number]["hyperparameters"] for number in group["params"] if number in own]
            for saved in known[:1]:  # a parameter that was frozen then has none
                self._check_kind(group, saved)
                group.update(saved)
        states = {n: _copied(each["state"]) for n, each in own.items() if each["state"]}
        try:
            self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        except (KeyError, ValueError) as error:
            kind = type(self.optimizer).__name__
            raise UserError(f"load_state_dict: {kind} can't use this optimizer's state: {error!r}") from error

    def _check_kind(self, group: dict[str, Any], saved: dict[str, Any]) -> None:
        """Raise UserError if the saved hyperparameters are another optimizer's.

        An optimizer of another version of torch has more of them or fewer, another one both.
        """
        foreign = [key for key in saved if key not in group]
        lacking = [key for key in group if key not in saved and key != "params"]
        if foreign and lacking:
            raise UserError(
                f"load_state_dict: {type(self.optimizer).__name__} can't use this optimizer's state: "
                f"it has {', '.join(foreign)} and no {', '.join(lacking)}"
            )


def _laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the parameter's strides: fused optimizers update by places in memory.

    On GPUs torch refuses other strides; on CPUs it computes wrong weights (2.13).
    """
    if gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer whose step needs arguments, such as LBFGS's closure."""
    step = inspect.signature(type(optimizer).step)  # a scheduler wraps the method of the object
    for argument in list(step.parameters.values())[1:]:
        if argument.default is argument.empty and argument.kind not in (
            argument.VAR_POSITIONAL, argument.VAR_KEYWORD,
        ):  # fmt: skip
            raise UserError(
                f"optimizer: {type(optimizer).__name__}.step needs a {argument.name}, which ParallelExecutor "
                "can't give: use one that needs gradients only, such as SGD or AdamW"
            )


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy, also of lists and dictionaries, such as Shampoo's matrices: devices must share none."""
    return {key: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for key, v in state.items()}


@dataclass
class Bucket:
    """Gradients that are merged together. `owner` is the number of the device that adds them up."""

    names: list[str]
    owner: int
    updates: dict[int, BucketOptimizer]  # by the device's number


class Buckets:
    """All buckets, closed in the order in which gradients complete.

    The owner of a bucket is the device with the fewest bytes so far. With `owner_updates` only the owner has
    an optimizer for it.
    """

    def __init__(
        self,
        replicas: Sequence[ModelReplica],
        make: MakeOptimizer,
        n_bytes: int,
        owner_updates: bool,
        model: nn.Module,
    ) -> None:
        self.all: list[Bucket] = []
        self._replicas, self._make, self._n_bytes = replicas, make, n_bytes
        self._owner_updates = owner_updates
        self._owned = [0] * len(replicas)
        self._hyperparameters: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        trained = [name for name, p in replicas[0].parameters.items() if p.requires_grad]
        self._initial: dict[str, Any] = {}  # hyperparameters of parameters that have no bucket yet
        self._made = weakref.WeakSet[torch.optim.Optimizer]()
        self._kind, self._known = "a model without trained parameters", dict[str, Any]()
        if trained:  # an unusable optimizer is refused before the first run
            found = BucketOptimizer(trained, replicas[0], make)
            found.check_parameters(model)
            self._check_new(found.optimizer)
            with private.without_modes():
                self._initial = {name: {**own, "state": {}} for name, own in found.state().items()}
            self._kind = type(found.optimizer).__name__
            group = found.optimizer.param_groups[0]
            self._known = {key: value for key, value in group.items() if key != "params"}

    def _check_new(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError for one that was made before, which has the parameters of that time."""
        if optimizer in self._made:
            raise UserError(
                "optimizer(parameters) returned an optimizer that it had returned before: let it make one "
                "from the parameters that it is given, which are other ones in each call"
            )
        self._made.add(optimizer)

    def described(self) -> dict[str, Any]:
        """Return what optimizers have in common if processes update alike."""
        return {"the optimizer": self._kind} | {
            f"{key} of {name}": _written_out(value)
            for name, own in self._initial.items()
            for key, value in own["hyperparameters"].items()
        }

    def extend(self, gradients: dict[str, Array]) -> None:
        """Put parameters without a bucket into new ones of one dtype each, in the order of `gradients`."""
        known = {name for bucket in self.all for name in bucket.names}
        names: list[str] = []
        size = 0
        for name, gradient in gradients.items():
            if name in known:
                continue
            if gradient.layout is not torch.strided:
                self._close([name], 0)
                continue
            if names and gradient.dtype is not gradients[names[-1]].dtype:
                self._close(names, size)
                names, size = [], 0
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
        updates = {d: BucketOptimizer(names, self._replicas[d], self._make) for d in devices}
        with private.without_modes():
            for each in updates.values():
                self._check_new(each.optimizer)
                each.load_state(self._loaded)
                for group in each.optimizer.param_groups:
                    group.update(_copied(self._hyperparameters))
        self.all.append(Bucket(list(names), owner, updates))

    def set_hyperparameters(self, values: dict[str, Any]) -> None:
        """Set values of all optimizers, including those of buckets to come.

        Raises:
            UserError: The optimizers do not have such a value, or a number's new value is none.
        """
        for name, value in values.items():
            if name not in self._known:
                there = ", ".join(self._known)
                raise UserError(f"{self._kind} has no {name}{nearest(name, self._known)} (it has: {there})")
            if isinstance(self._known[name], float) and not isinstance(value, Number | torch.Tensor):
                raise UserError(f"{name} of {self._kind} is a number, not {value!r:.100}")
        optimizers = [self._hyperparameters]
        for bucket in self.all:
            for updates in bucket.updates.values():
                optimizers += updates.optimizer.param_groups
        with private.without_modes():  # each has its own tensors, which a scheduler may write
            given = [_copied(values) for _ in optimizers]
        private.call_all(
            [partial(own.update, v) for own, v in zip(optimizers, given, strict=True)]
        )  # or none

    def n_bytes_of_state(self) -> int:
        """Return the bytes of all optimizers' state."""
        states = [list(u.optimizer.state.values()) for bucket in self.all for u in bucket.updates.values()]
        tensors = [leaf for leaf in private.tree_leaves(states) if isinstance(leaf, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def state(self) -> dict[str, Any]:
        """Return the optimizers' state and hyperparameters by parameter."""
        made = {**self._initial, **self._loaded}
        early = made.keys() - {name for bucket in self.all for name in bucket.names}
        with private.without_modes():
            for name in early:
                own = made[name] = copy.deepcopy(made[name])
                own["hyperparameters"].update(_copied(self._hyperparameters))
            for bucket in self.all:
                made.update(bucket.updates[min(bucket.updates)].state())
        return made

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, for buckets that exist and those to come."""
        self._loaded, self._hyperparameters = dict(state), {}
        with private.without_modes():  # an optimizer's state is ordinary tensors
            for bucket in self.all:
                for updates in bucket.updates.values():
                    updates.load_state(state)


def _written_out(value: Any) -> str | None:
    """Return a hyperparameter in words, or None if those would differ between processes."""
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    return repr(value) if isinstance(value, Number | str | tuple | list) else None
