"""New arrays: copies of data, modules, factories, and the scope in which torch's factories make arrays."""

import copy
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lockstep.errors import UserError
from lockstep.flow import graph, placement, private
from lockstep.flow.arrays import Array, array_leaves, from_tensor, record
from lockstep.flow.devices import Device
from lockstep.flow.engine import engine_of

_Module = TypeVar("_Module", bound=nn.Module)


class _Forks:
    """The number of forks between the first process and this one."""

    count = 0


def _count_fork() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_count_fork)


def _refuse_to_send(array: Array) -> NoReturn:
    """Refuse what torch would send as a part of a temporary tensor, which is gone when the other reads it."""
    raise UserError(f"{array!r} can't be sent to another process: send array.tensor()")


ForkingPickler.register(Array, _refuse_to_send)


def array(data: Any, dtype: torch.dtype | None = None) -> Array:
    """Return a copy of numbers, a NumPy array or a tensor, on the current device.

    Arrays inside lists are waited for.

    Raises:
        UserError: The data cannot be made a tensor, or no array can have its kind.
    """
    graph.check_not_ending()
    if isinstance(data, Array):
        copied: Any = data.detach().clone()
        return copied if dtype is None else copied.to(dtype)  # type: ignore[no-any-return]
    data = with_tensors(data)
    try:
        with private.without_modes():
            tensor = torch.as_tensor(data, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"flow.array can't make a tensor of {type(data).__name__}: {error}") from error
    made: Any = _copied(tensor, placement.current_device())
    if placement.program_of(()) is not None:
        made = made.clone()  # the function makes it anew in each run, and may write it
    return made  # type: ignore[no-any-return]


def _copied(tensor: torch.Tensor, device: Device, name: str = "") -> Array:
    """Return a copy of a tensor on a device. Raises UserError if no array can have its kind."""
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
    if kind not in (torch.strided, torch.sparse_coo):
        raise UserError(
            f"{placement.user_line()}: an array is dense or sparse COO, not {kind}: give it another form "
            "(to_dense, dequantize), or leave it an ordinary tensor"
        )
    return from_tensor(tensor, device, name)


def with_tensors(data: Any) -> Any:
    """Return lists and tuples of numbers with their arrays replaced by ordinary tensors."""
    if not isinstance(data, list | tuple) or not array_leaves(data):
        return data
    return private.tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, Array) else leaf, data)


def arrays(module: _Module) -> _Module:
    """Make the module's parameters and buffers arrays on the current device, in place; return the module.

    Arrays stay as they are, and gradients are kept. A parameter that another module has in common becomes the
    same array there, and so do those in the module's own lists and dictionaries. The names of parameters are
    shown in diagrams of programs. Optimizers are made afterwards.

    Raises:
        UserError: A tensor has hooks or no values, or a parameter that became an array in another module
            was changed since then. The module is as it was.
    """
    if not isinstance(module, nn.Module):
        raise UserError(f"flow.arrays takes a module, not {type(module).__name__}: flow.array takes tensors")
    tensors = [(name, t) for name, t in tensors_of(module) if not isinstance(t, Array)]
    check_tensors(tensors, "register them after flow.arrays, on the array")
    for name, parameter in module.named_parameters():
        _replacement_of(name, parameter)  # it may raise
    device = placement.current_device()
    made = {id(tensor): _array_of(name, tensor, device) for name, tensor in tensors}
    assignments = _assignments(module, made, set())
    assignments += [_record(name, t, made[id(t)]) for name, t in tensors if isinstance(t, nn.Parameter)]
    for part in module.modules():
        owners: Any = part._parameters, part._buffers  # not dictionaries of Python if the module is scripted
        for own in owners:
            found = [(key, made[id(tensor)]) for key, tensor in own.items() if id(tensor) in made]
            assignments += [functools.partial(own.__setitem__, *pair) for pair in found]
    private.call_all(assignments)  # all, or none
    return module


def _assignments(owner: Any, made: dict[int, Array], seen: set[int]) -> list[Callable[[], Any]]:
    """Return what puts arrays in the place of tensors, also in a module's own lists.

    Args:
        owner: A module, dictionary or list.
        made: The arrays, by the id of the tensor.
        seen: The ids of owners, which are looked at once.
    """
    seen.add(id(owner))
    container: Any = vars(owner) if isinstance(owner, nn.Module) else owner
    found: list[Callable[[], Any]] = []
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if type(value) is tuple and any(id(each) in made for each in value):
            replaced: Any = tuple(made.get(id(each), each) for each in value)
        else:
            replaced = made.get(id(value))
        if replaced is not None:
            found.append(functools.partial(container.__setitem__, key, replaced))
        elif isinstance(value, nn.Module | dict | list) and id(value) not in seen:
            found += _assignments(value, made, seen)
    return found


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module, with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def check_tensors(tensors: Iterable[tuple[str, torch.Tensor]], remedy: str) -> None:
    """Raise UserError for a tensor without values, or whose gradient has hooks, which are not copied.

    Args:
        remedy: What to do about the hooks.
    """
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise UserError(f"{name} has no values: give its lazy module a batch first")
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise UserError(f"{name} has hooks on its gradient, which its array would not have: {remedy}")


def _fingerprint(parameter: nn.Parameter) -> Any:
    """Return version, dtype and shape, which tell whether a parameter was written or converted."""
    version = None if parameter.is_inference() else parameter._version
    return version, parameter.dtype, parameter.shape


def _replacement_of(name: str, parameter: nn.Parameter) -> Array | None:
    """Return the array that the parameter became in another module, or None."""
    known = placement.replaced.get(id(parameter))
    array = None if known is None else known.array()
    if known is not None and array is not None and known.fingerprint != _fingerprint(parameter):
        raise UserError(
            f"{name} became an array in another module, as {known.name}, and was changed since then: make "
            "all modules that have it arrays before any of them trains"
        )
    return array


def _array_of(name: str, tensor: torch.Tensor, device: Device) -> Array:
    """Return the array that takes the place of a module's tensor."""
    known = _replacement_of(name, tensor) if isinstance(tensor, nn.Parameter) else None
    if known is not None:
        return known
    made = _copied(tensor, device, name)
    vars(made).update(private.marks(tensor))  # such as `bias.no_decay = True`
    if isinstance(tensor, nn.Parameter):
        private.as_parameter(made.requires_grad_(tensor.requires_grad))
        made.grad = None if tensor.grad is None else array(tensor.grad)
    return made


def _record(name: str, parameter: nn.Parameter, made: Array) -> Callable[[], Any]:
    """Return what remembers that an array takes a parameter's place."""
    gone: Any = functools.partial(placement.replaced.pop, id(parameter))
    _watch_optimizers()
    known, lazy = weakref.ref(parameter, gone), weakref.ref(made)
    record = placement.Replaced(name, known, lazy, _fingerprint(parameter))
    return functools.partial(placement.replaced.__setitem__, id(parameter), record)


def _refuse_replaced(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise UserError before a step on parameters that are no longer their module's."""
    for group in optimizer.param_groups if placement.replaced else ():
        for parameter in group["params"]:
            known = placement.replacement_of(parameter)
            if known is not None:
                raise UserError(
                    f"{type(optimizer).__name__} was made before flow.arrays, which has replaced "
                    f"{known.name} by an array that the optimizer does not have: make it after flow.arrays"
                )


@functools.cache
def _watch_optimizers() -> None:
    """Look at the parameters of optimizers before each step, from now on."""
    register_optimizer_step_pre_hook(_refuse_replaced)


def _factory(make: Callable[[], torch.Tensor]) -> Array:
    graph.check_not_ending()
    with recording_everything():
        made = make()
    if not isinstance(made, Array):
        raise UserError(
            f"{placement.user_line()}: torch's default device is {made.device}, whose tensors have no "
            "values: make arrays outside of that scope"
        )
    return made


def zeros(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Array:
    """Return an array of zeros on the current device."""
    return _factory(lambda: torch.zeros(shape, dtype=dtype))


def ones(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Array:
    """Return an array of ones on the current device."""
    return _factory(lambda: torch.ones(shape, dtype=dtype))


def randn(shape: int | Sequence[int], mean: float = 0.0, std: float = 1.0) -> Array:
    """Return normally distributed float32 numbers, on the current device."""
    return _factory(lambda: torch.empty(shape, dtype=torch.float32).normal_(mean, std))


def randb(shape: int | Sequence[int], p: float) -> Array:
    """Return float32 numbers that are 1 with probability p and 0 otherwise, on the current device."""
    return _factory(lambda: torch.empty(shape, dtype=torch.float32).bernoulli_(p))


class _ScopeMode:
    """A mode that is in effect until its scope ends, which sets `ended`, or the process is forked."""

    def __init__(self) -> None:
        super().__init__()
        self._fork, self.ended = _Forks.count, False

    def holds(self) -> bool:
        """Return whether the mode is in effect: a forked child begins outside of its parent's scopes."""
        return not self.ended and self._fork == _Forks.count


class _RecordingMode(_ScopeMode, private.DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operations of torch."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.holds():
            return function(*args, **(kwargs or {}))
        return record(function, args, kwargs or {})


class recording_everything(private.Scope):  # noqa: N801
    """A scope in which operations on ordinary tensors and factories are recorded, too."""

    def calls(self) -> tuple[list[Any], list[Any]]:
        return _mode_calls()


def _mode_calls() -> tuple[list[Any], list[Any]]:
    if any(type(mode) is _RecordingMode and mode.holds() for mode in private.active_modes()):
        return [], []  # a second mode would see what the first does
    return private.mode_calls(_RecordingMode(), _CopyingMode())


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return the array that is the deep copy of a tensor, with its gradient."""
    if id(tensor) not in memo:
        copied = memo[id(tensor)] = array(tensor).requires_grad_(tensor.requires_grad)
        vars(copied).update(copy.deepcopy(private.marks(tensor), memo))
        if tensor.is_leaf and tensor.grad is not None:
            copied.grad = _deep_copy(tensor.grad, memo)
    return memo[id(tensor)]


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_NO_MEMORY = "data is not allocated", "Cannot access data pointer of Tensor"  # torch's messages


class _CopyingMode(_ScopeMode, TorchFunctionMode):
    """A mode that makes deep copies arrays; torch would put an ordinary tensor's memory under an array.

    It also replaces the arrays in lists that torch.tensor is given, whose memory torch would read, by their
    values, refuses to put an array's memory under an ordinary tensor, and explains the error of a function
    of torch that reads the memory of an array.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.holds():
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            return _deep_copy(*args)
        if function == _SET_DATA and isinstance(args[1], Array) and not isinstance(args[0], Array):
            raise UserError(
                f"{placement.user_line()}: an ordinary tensor can't have the data of an array: call "
                "flow.arrays(module) before module.to(dtype), or convert it outside of `with flow.device`"
            )
        if function is torch.tensor and args:
            args = (with_tensors(args[0]), *args[1:])
        try:
            return function(*args, **(kwargs or {}))
        except RuntimeError as error:
            if not any(text in str(error) for text in _NO_MEMORY):
                raise
            raise UserError(
                f"{placement.user_line()}: {function.__name__} reads the memory of a tensor in C++, but "
                "`with flow.device` has made it an array: give tensors instead of lists, or call it outside"
            ) from error


class device(ContextDecorator, placement.CurrentDevice):  # noqa: N801
    """A scope in which results lie on one device, and torch's factories make arrays.

    Args:
        device: The device; `with` also gives it to the name behind `as`.

    Raises:
        UserError: This is not a device, or another process's.
    """

    def __init__(self, device: Device) -> None:
        engine_of(device)
        super().__init__(device)

    def calls(self) -> tuple[list[Any], list[Any]]:
        begin, end = super().calls()
        mode_begin, mode_end = _mode_calls()
        return begin + mode_begin, mode_end + end

    def _recreate_cm(self) -> "device":
        return device(self.value)
