"""Settings that a program changes between calls: training modes of modules, hyperparameters of optimizers.

The caller finds the modules and optimizers while it pickles functions. After each change the next call sends
the settings, so that all ranks compute with the caller's. An optimizer's state changes in every step, on all
ranks alike, so it is sent only after load_state_dict has replaced it.
"""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from lockstep.synk.pickling import is_optimizer


def kinds() -> tuple[type, ...]:
    """Return the classes that have settings, or none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    return () if torch is None else (torch.nn.Module, torch.optim.Optimizer)


@dataclass(frozen=True)
class _OptimizerSettings:
    """An optimizer's settings.

    Attributes:
        groups: Hyperparameters of each group of parameters.
        state: State by the parameter's index, on the CPU, if it was replaced since the last call; else None.
    """

    groups: list[dict[str, Any]]
    state: dict[int, Any] | None


class Settings:
    """The modules and optimizers of this process, in one group per distribute()."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Any]] = {}
        self._n_param_groups: dict[int, int] = {}  # by id of the optimizer, as the ranks have them
        self._states: dict[int, Any] = {}  # by id of the optimizer: the state that the ranks have, too
        self._delivered: bytes | None = None

    def add(self, number: int, objects: list[Any]) -> None:
        """Add a group, which lists the same objects in the same order on all ranks."""
        self._groups[number] = objects
        optimizers = [thing for thing in objects if is_optimizer(thing)]
        self._n_param_groups.update({id(thing): len(thing.param_groups) for thing in optimizers})
        self._states.update({id(thing): thing.state for thing in optimizers})

    def capture(self) -> bytes | None:
        """Return the settings that a call must send to the workers, or None if they are unchanged.

        Raises:
            ValueError: The number of parameter groups of an optimizer has changed.
        """
        if not self._groups:
            return None
        states = {number: [self._read(thing) for thing in group] for number, group in self._groups.items()}
        try:
            packed = pickle.dumps(states)
        except Exception:  # a function in a group of parameters, for instance
            packed = cloudpickle.dumps(states)
        if packed == self._delivered:
            return None
        self._delivered = None  # until `confirm`: a call that fails may have brought them to some ranks
        return packed

    def confirm(self, packed: bytes | None) -> None:
        """Record that all ranks have received these settings."""
        if packed is None:
            return
        self._delivered = packed
        optimizers = [
            thing for group in self._groups.values() for thing in group if id(thing) in self._states
        ]
        self._states.update({id(thing): thing.state for thing in optimizers})

    def apply(self, packed: bytes) -> None:
        """Give this worker's objects the caller's settings."""
        for number, states in pickle.loads(packed).items():
            for thing, state in zip(self._groups.get(number, []), states, strict=False):
                if isinstance(state, bool):
                    thing.training = state
                    continue
                if state.state is not None:
                    thing.load_state_dict({**thing.state_dict(), "state": state.state})
                _write(thing.param_groups, state.groups)

    def _read(self, thing: Any) -> bool | _OptimizerSettings:
        if not is_optimizer(thing):
            return bool(thing.training)
        expected = self._n_param_groups[id(thing)]
        if len(thing.param_groups) != expected:
            raise ValueError(
                f"{type(thing).__name__} has {len(thing.param_groups)} groups of parameters, {expected} "
                "at distribute(). Add groups before that"
            )
        replaced = thing.state is not self._states[id(thing)]
        return _OptimizerSettings(
            groups=[dict(_hyperparameters(group)) for group in thing.param_groups],
            state=_to_cpu(thing.state_dict()["state"]) if replaced else None,
        )


def receive(context: Any, objects: Iterator[Any]) -> None:
    """Add a group on a worker, and its modules to the owners of the shared variables."""
    number, group = next(objects)
    context.settings.add(number, group)
    for shared in context.shareds.values():
        shared.sync_objects()
        shared.add_owners(thing for thing in group if not is_optimizer(thing))


def _hyperparameters(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if name != "params":
            yield name, value.tolist() if hasattr(value, "data_ptr") else value


def _to_cpu(value: Any) -> Any:
    """Return a state, a dictionary of dictionaries, with its tensors on the CPU."""
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    return value.cpu() if hasattr(value, "data_ptr") else value


def _write(groups: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
    for group, state in zip(groups, states, strict=True):
        for name, value in state.items():
            if hasattr(group.get(name), "data_ptr"):  # a tensor, which a captured step may hold
                group[name].copy_(group[name].new_tensor(value))
            else:
                group[name] = value
