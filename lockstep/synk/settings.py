"""Settings that a program changes between calls: of modules and of optimizers.

Those of a module are its training mode and which of its parameters are frozen, those of an optimizer its
hyperparameters, and that of a shared tensor outside of these modules whether it requires a gradient.

The caller finds the modules and optimizers while it pickles functions. After each change the next call sends
the settings, so that all ranks compute with the caller's. An optimizer's state changes in every step, on all
ranks alike, so it is sent only after load_state_dict has replaced it.
"""

import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import cloudpickle


def kinds() -> tuple[type, ...]:
    """Return the classes that have settings, or none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    return () if torch is None else (torch.nn.Module, torch.optim.Optimizer)


def is_optimizer(obj: Any) -> bool:
    """Return whether an object is an optimizer. A module may have `param_groups`, too."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.optim.Optimizer)


def is_tensor(obj: Any) -> bool:
    """Return whether an object is a tensor of torch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _is_module(obj: Any) -> bool:
    return not is_optimizer(obj) and not is_tensor(obj)


def outside(tensors: list[Any], objects: list[Any]) -> list[Any]:
    """Return the tensors that are no parameters or buffers of the modules among these objects."""
    modules = filter(_is_module, objects)
    owned = chain.from_iterable((m._parameters.values(), m._buffers.values()) for m in modules)
    inside = set(map(id, chain.from_iterable(owned)))
    return [tensor for tensor in tensors if id(tensor) not in inside]


@dataclass(frozen=True)
class _TensorValue:
    """A hyperparameter that is a tensor. Its numbers are pickled faster than a tensor."""

    numbers: Any
    dtype: Any


@dataclass(frozen=True)
class _ModuleSettings:
    """A module's settings.

    Attributes:
        training: Its training mode.
        frozen: The names of its own parameters that require no gradient.
    """

    training: bool
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class _OptimizerSettings:
    """An optimizer's settings.

    Attributes:
        groups: Hyperparameters of each group of parameters.
        state: State by the parameter's index, on the CPU, if it was replaced since the last call of the group
            that is called; else None.
    """

    groups: list[dict[str, Any]]
    state: dict[int, Any] | None


@dataclass(frozen=True)
class _SharedTensorSettings:
    """The settings of a shared tensor."""

    requires_grad: bool


@dataclass
class _Delivered:
    """A module, an optimizer or a shared tensor that the ranks have copies of.

    Attributes:
        parameters: The parameters of the copies by group; empty but for an optimizer. Kept for their ids.
        ids: Their ids by group.
        state: The optimizer's state that the copies have, too; None if another group's call may have
            changed it since.
        places: The dictionaries of a shared module's parameters and submodules, each with what it had.
            Empty on a worker.
    """

    thing: Any
    parameters: list[list[Any]]
    ids: list[list[int]]
    state: Any
    places: list[tuple[Mapping[str, Any], dict[str, Any]]]

    @staticmethod
    def make(thing: Any, is_shared: bool) -> "_Delivered":
        groups = thing.param_groups if is_optimizer(thing) else []
        parameters = [list(group["params"]) for group in groups]
        places = [(has, dict(has)) for has in (thing._parameters, thing._modules)] if is_shared else []
        return _Delivered(thing, parameters, _ids(groups), thing.state if groups else None, places)

    @property
    def fits(self) -> bool:
        """True if the copies can take the settings."""
        if is_optimizer(self.thing):
            return _ids(self.thing.param_groups) == self.ids
        return not any(_has_other_parameters(now, had) for now, had in self.places if now or had)

    def read(self, known: dict[int, Any], replaced: dict[int, Any]) -> Any:
        """Return the settings of the copy, or None if it can't take them.

        Args:
            known: The settings that were read for copies in other groups, by the object's id; extended.
            replaced: The states of optimizers that the copies lack, by the optimizer's id.
        """
        if is_optimizer(self.thing) and not self.fits:
            return None
        if id(self.thing) not in known:
            known[id(self.thing)] = _read(self.thing, replaced)
        return known[id(self.thing)]


class Settings:
    """The objects of this process that have settings, in one group per distribute().

    An object that several calls of distribute() send has a copy of its own in each group.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[_Delivered]] = {}
        self._called = 0  # the group of the last `capture`
        self._sent: bytes | None = None  # the settings of the last `capture`, pickled
        self._delivered: bytes | None = None  # those that all ranks have
        self._received: dict[int, list[Any]] = {}  # on a worker

    def add(
        self, number: int, objects: list[Any], is_shared: Callable[[Any], bool] = lambda parameter: False
    ) -> None:
        """Add a group, which lists the same objects in the same order on all ranks."""
        with_shared = _ids_of_modules(objects, is_shared)
        self._groups[number] = [_Delivered.make(thing, id(thing) in with_shared) for thing in objects]

    def capture(self, number: int) -> bytes | None:
        """Return the settings that a call must send to the workers, for `apply`.

        They are those of all groups: ranks have one class of the program, whose attributes are copies of the
        last group, and a callable of another one may use these.

        Args:
            number: Group of the function that is called; 0 if it has none.

        Returns:
            The settings; no bytes if the workers have received them, None if no object has any.

        Raises:
            ValueError: The parameters of an optimizer in this group, or their groups, have changed, or the
                program has added, replaced or removed parameters of a shared module, or a layer that has
                some.
        """
        if not self._groups:
            return None
        called = self._groups.get(number, [])
        _check_fit(called)
        optimizers = [entry for entry in called if is_optimizer(entry.thing)]
        replaced = {
            id(entry.thing): _to_cpu(entry.thing.state_dict()["state"])
            for entry in optimizers
            if entry.thing.state is not entry.state
        }
        known: dict[int, Any] = {}  # many groups may have one object
        states = {n: [entry.read(known, replaced) for entry in group] for n, group in self._groups.items()}
        self._called = number
        self._mark_changed({id(entry.thing) for entry in optimizers})
        try:
            self._sent = pickle.dumps(states)
        except Exception:  # a function in a group of parameters, for instance
            states = {n: group for n, group in states.items() if n == number or _can_be_pickled(group)}
            self._sent = cloudpickle.dumps(states)
        # A state that is loaded twice, an empty one for instance, has changed on the ranks in between.
        if self._sent == self._delivered and not replaced:
            return b""
        self._delivered = None  # until `confirm`: a call that fails may have brought them to some ranks
        # With the classes of the program, which workers can't import.
        packed: bytes = cloudpickle.dumps(states)
        return packed

    def confirm(self, packed: bytes | None) -> None:
        """Record that all ranks have received these settings."""
        if not packed:
            return
        self._delivered = self._sent
        for entry in self._groups.get(self._called, []):
            if is_optimizer(entry.thing):
                entry.state = entry.thing.state

    def _mark_changed(self, optimizers: set[int]) -> None:
        """Let other groups that have these optimizers get their state with the next call."""
        for number, group in self._groups.items() if optimizers else ():
            for entry in group if number != self._called else ():
                if id(entry.thing) in optimizers:
                    entry.state = None

    def apply(self, packed: bytes) -> None:
        """Give this worker's objects the caller's settings, which a callable may have changed since.

        Args:
            packed: From `capture`; empty for the settings of the last call.
        """
        if packed:
            self._received = pickle.loads(packed)
        for number, states in self._received.items():
            for entry, state in zip(self._groups.get(number, []), states, strict=False):
                if isinstance(state, _OptimizerSettings):
                    _apply_to_optimizer(entry.thing, state, with_state=bool(packed))
                elif isinstance(state, _SharedTensorSettings):
                    if entry.thing.requires_grad is not state.requires_grad:
                        entry.thing.requires_grad_(state.requires_grad)
                elif state is not None:
                    _apply_to_module(entry.thing, state)


def _read(thing: Any, replaced: dict[int, Any]) -> Any:
    if is_tensor(thing):
        return _SharedTensorSettings(thing.requires_grad)
    if is_optimizer(thing):
        groups = [dict(_hyperparameters(group)) for group in thing.param_groups]
        return _OptimizerSettings(groups, replaced.get(id(thing)))
    frozen = tuple(n for n, p in thing._parameters.items() if p is not None and not p.requires_grad)
    return _ModuleSettings(bool(thing.training), frozen)


def _check_fit(group: list[_Delivered]) -> None:
    for entry in group:
        if entry.fits:
            continue
        if not is_optimizer(entry.thing):
            raise ValueError(
                f"{type(entry.thing).__name__} has other parameters than at distribute(), which the ranks "
                "lack. Change their values instead: load_state_dict without assign=True"
            )
        before, now = len(entry.ids), len(entry.thing.param_groups)
        what = "other parameters than" if before == now else f"{now} groups of parameters, {before}"
        raise ValueError(
            f"{type(entry.thing).__name__} has {what} at distribute(). Create this function again, and "
            "call distribute()"
        )


def _apply_to_module(module: Any, settings: _ModuleSettings) -> None:
    if module.training is not settings.training:
        module.training = settings.training
    for name, parameter in module._parameters.items():
        requires_grad = name not in settings.frozen
        if parameter is not None and parameter.requires_grad is not requires_grad:
            parameter.requires_grad_(requires_grad)


def _apply_to_optimizer(optimizer: Any, settings: _OptimizerSettings, with_state: bool) -> None:
    if with_state and settings.state is not None:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": settings.state})
        _restore_dtypes(optimizer.state_dict()["state"], settings.state)
    _write(optimizer.param_groups, settings.groups)


def _can_be_pickled(settings: list[Any]) -> bool:
    with suppress(Exception):  # whatever a user's __reduce__ raises
        cloudpickle.dumps(settings)
        return True
    return False


def _restore_dtypes(loaded: Any, sent: Any) -> Any:
    """Return a state with the dtypes of the caller. load_state_dict casts to the dtype of the parameter."""
    if isinstance(sent, dict):
        for key in sent.keys() & loaded.keys():
            loaded[key] = _restore_dtypes(loaded[key], sent[key])
    elif isinstance(sent, list | tuple):
        return type(sent)(map(_restore_dtypes, loaded, sent))
    elif is_tensor(sent) and sent.dtype != loaded.dtype:
        return sent.to(loaded.device)
    return loaded


def receive(context: Any, objects: Iterator[Any]) -> None:
    """Add a group on a worker, and its modules to the owners of the shared variables."""
    number, group = next(objects)
    context.settings.add(number, group)
    for shared in context.shareds.values():
        for take_over in shared.sync_objects():
            take_over()
        shared.add_owners(thing for thing in group if _is_module(thing))


def _ids(groups: list[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


def _ids_of_modules(objects: list[Any], is_shared: Callable[[Any], bool]) -> set[int]:
    """Return the ids of the modules with a shared parameter, and of all modules in these."""
    found: set[int] = set()
    for thing in objects:
        if id(thing) not in found and _is_module(thing) and any(map(is_shared, parameters(thing))):
            found.update(map(id, thing.modules()))
    return found


def _has_other_parameters(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a parameter, or a submodule that has some, was added, replaced or removed."""
    if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
        return False  # the usual case, at every call
    changed = [name for name in now.keys() | before.keys() if now.get(name) is not before.get(name)]
    return any(has_parameters(names.get(name)) for name in changed for names in (now, before))


def has_parameters(part: Any) -> bool:
    """Return whether this is a parameter, or a module that has one."""
    return part is not None and (not hasattr(part, "_modules") or any(True for _ in parameters(part)))


def parameters(module: Any) -> Iterator[Any]:
    """Yield a module's parameters, which a class may hide by a `parameters` of its own."""
    for each in module.modules():
        yield from filter(lambda parameter: parameter is not None, each._parameters.values())


def _hyperparameters(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if name != "params":
            yield name, _TensorValue(value.tolist(), value.dtype) if is_tensor(value) else value


def _to_cpu(value: Any) -> Any:
    """Return a state, a dictionary of dictionaries, with its tensors on the CPU."""
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    return value.cpu() if is_tensor(value) else value


def _write(groups: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
    for group, state in zip(groups, states, strict=True):
        for removed in group.keys() - state.keys() - {"params"}:
            del group[removed]
        for name, value in state.items():
            if not isinstance(value, _TensorValue):
                group[name] = value  # a number even where this rank has a tensor, which rounds differently
            elif getattr(group.get(name), "dtype", None) == value.dtype:  # a captured step may hold it
                group[name].copy_(group[name].new_tensor(value.numbers))
            else:
                group[name] = sys.modules["torch"].tensor(value.numbers, dtype=value.dtype)
