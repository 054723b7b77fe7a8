"""Torch tensors that all ranks share: one, or a module's parameters, gradients or buffers, as one vector."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.exchange import Op
from lockstep.synk import rows
from lockstep.synk.programs.homes import GpuHome, Home, HostHome, make_home
from lockstep.synk.shareds import Shared


class TensorShared(Shared):
    """A variable that is a tensor, or made of tensors. Its memory is this rank's: `home` knows which kind."""

    kind = "callable"
    is_array = True

    def __init__(self, name: str, parts: list[Any], home: Home) -> None:
        self.name, self.parts, self.home = name, parts, home

    @abstractmethod
    def marks(self) -> Any:
        """What changes when torch writes to it."""

    @abstractmethod
    def describe(self) -> Any:
        """From what a worker makes it: a class, a number, a name, and what `make` needs."""

    def settle(self, here: Any) -> tuple[int, ...]:
        return super().settle(here) if here.gpu is None else self._mirror(here)

    def assign(self, value: np.ndarray) -> None:
        if isinstance(self.home, GpuHome):
            self.put(value)
        else:
            super().assign(value)

    @property
    def folds_on_gpu(self) -> bool:
        return isinstance(self.home, GpuHome) and self.dtype == np.float32

    def leave_gpu(self) -> None:
        """Its value goes back to ordinary memory: the user's tensors stay what they are."""
        value = self.get()
        self.home.leave()
        self.home = HostHome()
        self.put(value)

    def _mirror(self, here: Any) -> tuple[int, ...]:
        """On a GPU the place in host memory gets a copy; the value stays where it is."""
        if self.place is not None and self.n_bytes <= self.place.n_bytes:
            self.view(here, here.rank, self.shape)[...] = self.get()
        return self.shape


class SharedTensor(TensorShared):
    """One tensor. Its memory changes (`Tensor.data`), the tensor object stays."""

    def __init__(self, name: str, tensor: torch.Tensor, home: Home) -> None:
        super().__init__(name, [tensor], home)
        self.put(np.array(tensor.detach().numpy()))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self.parts[0].dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts[0].shape)

    def get(self) -> np.ndarray:
        return self.home.read(self.parts[0].detach())

    def put(self, value: np.ndarray) -> None:
        self.parts[0].data = self.home.hold(value)

    def keep(self) -> Any:
        return super().keep() if isinstance(self.home, HostHome) else self.parts[0].detach()

    def show(self, kept: Any, choice: rows.Choice) -> None:
        if isinstance(self.home, HostHome):
            super().show(kept, choice)
        else:
            self.home.run(lambda: self._point_to(_chosen(kept, choice)))

    def restore(self, kept: Any) -> None:
        if isinstance(self.home, HostHome):
            super().restore(kept)
        else:
            self._point_to(kept)

    def all_reduce_on_gpu(self, op: Op, weight: float | None) -> None:
        self.home.fold(self.parts[0].detach(), op, weight)

    def _point_to(self, tensor: torch.Tensor) -> None:
        self.parts[0].data = tensor

    def marks(self) -> Any:
        return self.parts[0]._version

    def describe(self) -> Any:
        return SharedTensor, self.number, self.name, _describe(self.parts[0])

    @classmethod
    def make(cls, here: Any, name: str, described: Any) -> Shared:
        return cls(name, _make_tensor(*described), make_home(here))


class Vector:
    """What stands for all parameters of a module, or their gradients, as one vector."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class _Flat(TensorShared):
    """A vector that has tensors of a module's parameters as its parts."""

    params: list[torch.Tensor]
    _flat: torch.Tensor

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self._flat.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._flat.shape)

    def get(self) -> np.ndarray:
        self.home.run(self._collect)
        return self.home.read(self._flat)

    def put(self, value: np.ndarray) -> None:
        self._flat = self.home.hold(value)
        for param, part in zip(self.params, _cut(self._flat, self.params), strict=True):
            self._point(param, part)

    def all_reduce_on_gpu(self, op: Op, weight: float | None) -> None:
        self.home.run(self._collect)
        self.home.all_reduce(self._flat, op, weight)

    @abstractmethod
    def _point(self, param: torch.Tensor, part: torch.Tensor) -> None:
        """Makes a part of the vector what belongs to this parameter."""

    @abstractmethod
    def _collect(self) -> None:
        """Moves back into the vector what has been moved out."""


class Weights(_Flat):
    """The parameters of a module, one vector."""

    def __init__(self, name: str, params: Sequence[torch.Tensor], home: Home) -> None:
        super().__init__(name, [Vector(name), *params], home)
        self.params = list(params)
        self.put(np.concatenate([param.detach().numpy().reshape(-1) for param in params]))

    def marks(self) -> Any:
        return [param._version for param in self.params]

    def describe(self) -> Any:
        return Weights, self.number, self.name, [_describe(param) for param in self.params]

    @classmethod
    def make(cls, here: Any, name: str, described: Any) -> Shared:
        return cls(name, [_make_tensor(*one) for one in described], make_home(here))

    def _point(self, param: torch.Tensor, part: torch.Tensor) -> None:
        param.data = part

    def _collect(self) -> None:
        for param, part in zip(self.params, _cut(self._flat, self.params), strict=True):
            if param.data_ptr() != part.data_ptr():  # module.to() and the like have moved it out
                part.copy_(param.data)
                param.data = part


class Buffers(Weights):
    """The buffers of a module that have one dtype, as one vector.

    They are nobody's to declare: a sliced call goes on with them from part to part, as with random streams.
    """

    def marks(self) -> Any:
        return None

    def describe(self) -> Any:
        return Buffers, *super().describe()[1:]


class Gradients(_Flat):
    """The gradients of a module's parameters, one vector. A parameter without one has zero."""

    def __init__(self, name: str, weights: Weights, home: Home) -> None:
        super().__init__(name, [Vector(name)], home)
        self.weights, self.params = weights, weights.params
        self.put(np.zeros(weights.shape, weights.dtype))

    def marks(self) -> Any:
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self.params]

    def describe(self) -> Any:
        return Gradients, self.number, self.name, self.weights.number

    @classmethod
    def make(cls, here: Any, name: str, described: Any) -> Shared:
        return cls(name, here.shareds[described], make_home(here))

    def _point(self, param: torch.Tensor, part: torch.Tensor) -> None:
        param.grad = part

    def _collect(self) -> None:
        for param, part in zip(self.params, _cut(self._flat, self.params), strict=True):
            if param.grad is None:
                part.zero_()
                param.grad = part
            elif param.grad.data_ptr() != part.data_ptr():  # zero_grad() has dropped the old one
                part.copy_(param.grad)
                param.grad = part


def _chosen(tensor: torch.Tensor, choice: rows.Choice) -> torch.Tensor:
    if isinstance(choice, slice):
        return tensor[choice]
    return tensor.index_select(0, torch.from_numpy(np.ascontiguousarray(choice)).to(tensor.device))


def _cut(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a vector, in the shapes of the parameters. No copies."""
    parts = flat.split_with_sizes([param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def _describe(tensor: torch.Tensor) -> tuple[bool, tuple[int, ...], torch.dtype, bool]:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return is_parameter, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _make_tensor(is_parameter: bool, shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> torch.Tensor:
    """A tensor whose value comes by Adopt."""
    tensor = torch.zeros(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, requires_grad=grad) if is_parameter else tensor.requires_grad_(grad)
