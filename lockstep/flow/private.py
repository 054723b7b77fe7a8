"""All of torch that is used here and is not its public interface. Tried with torch 2.13.0."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lockstep.backends.devices import on_gpus

__all__ = ["DispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

without_modes = _disable_current_modes  # a context in which ordinary tensors are just that
no_torch_function = torch._C._disabled_torch_function_impl
below_dispatch = (
    torch._C._DisableTorchDispatch
)  # a context in which tensor subclasses are what they derive from
current_node: Callable[[], Any] = torch._C._current_autograd_node  # None outside of a backward function
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of this thread


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that costs no more than the call:

    dynamo, which torch would wrap around it, has no part in this.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def make_wrapper(
    kind: type,
    size: Any,
    stride: Any,
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: torch.layout,
) -> Any:
    """A tensor of a subclass without memory."""
    make = torch.Tensor._make_wrapper_subclass
    if layout is not torch.strided:
        return make(kind, size, dtype=dtype, layout=layout, device=device)
    return make(kind, size, strides=stride, storage_offset=offset, dtype=dtype, device=device)


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which modules and optimizers take for an nn.Parameter from now on."""
    tensor._is_param = True
    return tensor


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, where a subclass has a `data` of its own."""
    getattr(torch._C.TensorBase, "data").__set__(tensor, value)  # noqa: B009


def in_backward() -> bool:
    """Whether this thread works for autograd's engine."""
    return torch._C._current_graph_task_id() != -1


def default_generator(device: torch.device) -> torch.Generator:
    if on_gpus([device]):
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class _Quiet(threading.local):
    predicting = False


_quiet = _Quiet()
_fake_lock = threading.Lock()
# It logs a shape that does not fit as an error of its own, before it raises it.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _quiet.predicting)


@contextlib.contextmanager
def predicting() -> Iterator[None]:
    """Tensors made inside have shapes, strides and dtypes, and no values. For one thread at a time."""
    with _fake_lock:
        _quiet.predicting = True
        try:
            with _fake_mode():
                yield
        finally:
            _quiet.predicting = False


@functools.cache
def _fake_mode() -> Any:
    """Importing it takes longer than importing torch, and the engine by itself has no need of it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def depends_on_values(error: Exception) -> bool:
    """Whether this is what predicting raises where shapes can't be said before the values are there."""
    from torch._subclasses import fake_tensor

    return isinstance(
        error,
        fake_tensor.DataDependentOutputException
        | fake_tensor.DynamicOutputShapeException
        | fake_tensor.UnsupportedOperatorException
        | NotImplementedError,
    )


def torch_folder() -> str:
    return str(torch.__path__[0])
