"""Construction of a network whose weights are loaded afterwards, without drawing random ones first.

AlexNet's initial weights take as long as one of its steps. A constructor may use them or draw more numbers
for itself, so they are left out only where nothing but the parameters' values depends on them.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.kaiming_uniform_,
    }
)
_FACTS = (int, torch.Size, type(None))  # results that do not depend on a parameter's values


class _SkippedDraws(TorchFunctionMode):
    """A context in which parameters keep what their memory had, instead of random numbers.

    Attributes:
        is_read: Whether a value that was left out has been used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_read = False
        self._skipped: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target, *others = (*args, *kwargs.values()) or (None,)
        if func in _DRAWS and isinstance(target, nn.Parameter):
            self._skipped[id(target)] = target
            return target
        result = func(*args, **kwargs)
        reads = any(map(self._has, others)) or (type(target) in (list, tuple) and self._has(target))
        is_fact = type(result) in _FACTS or (_is_property(func) and not isinstance(result, torch.Tensor))
        if reads or (self._has(target) and result is not target and not is_fact):
            self.is_read = True
        return result

    def _has(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._has, value))
        return id(value) in self._skipped


def _is_property(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def make_without_draws(
    make: Callable[[], Any], try_out: Callable[[Any], None], loaded: Collection[str]
) -> nn.Module | None:
    """Return the network that `make` makes, but for the values of its parameters; None if that can't be told.

    In that case `make` may have been called, and torch's generator is as before. It can't be told if numbers
    are drawn for anything else, if a skipped value is read, or if the first pass changes attributes, such as
    a constant that is computed then.

    Args:
        make: Makes the network.
        try_out: Runs a first pass of the network.
        loaded: Names of all weights and buffers that the caller loads, such as 'weights/fc.bias'.
    """
    before, draws = torch.get_rng_state(), _SkippedDraws()
    model, is_safe = None, False
    with suppress(Exception):  # an error comes again where the network is made in full
        with draws:
            model = make()
        attributes = _attributes(model)
        try_out(model)
        is_safe = (
            not draws.is_read and _names(model) == {*loaded} and _are_same(attributes, _attributes(model))
        )
    is_safe &= torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    return model if is_safe else None


def _names(model: nn.Module) -> set[str]:
    named = ("weights", model.named_parameters()), ("buffers", model.named_buffers())
    return {f"{kind}/{name}" for kind, values in named for name, _ in values}


def _attributes(model: nn.Module) -> list[tuple[Any, int]]:
    """Return the attributes that may hold a state, with the sizes of containers.

    Parameters, buffers and modules are no such attributes. Lockstep's own layers compute constants only.
    """
    values = [
        value
        for module in model.modules()
        if not type(module).__module__.startswith("lockstep.")
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    ]
    return [(value, len(value) if isinstance(value, list | dict | set) else 0) for value in values]


def _are_same(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    return len(before) == len(after) and all(
        old is new and size == new_size for (old, size), (new, new_size) in zip(before, after, strict=True)
    )
