"""Torch tensors that all ranks share: one, or a module's parameters and gradients, as vectors in blocks."""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.exchange import Op
from lockstep.synk.programs.homes import GpuHome, Home, make_home
from lockstep.synk.session import current_team
from lockstep.synk.shareds import Shared, make_places


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

    def leave_gpu(self) -> None:
        self.home.leave()

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


_modules: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Weights, Gradients]] = (
    weakref.WeakKeyDictionary()
)


def share(thing: Any) -> Any:
    """See lockstep.synk.share."""
    team = current_team("share()")
    if isinstance(thing, torch.nn.Module):
        if thing not in _modules or _modules[thing][0] is not team:
            name = type(thing).__name__
            params = _check_params(name, list(thing.parameters()), team.here)
            if team.here.gpu is not None and list(thing.buffers()):
                raise TypeError(f"share(): {name} has buffers, which ranks on GPUs can't take along yet")
            weights = Weights(f"weights of {name}", params, make_home(team.here))
            _add(team, weights)
            gradients = Gradients(f"gradients of {name}", weights, make_home(team.here))
            _add(team, gradients)
            _modules[thing] = team, weights, gradients
    elif isinstance(thing, torch.Tensor):
        if team.known.label(thing) is None:
            _check_params("a tensor", [thing], team.here)
            _add(team, SharedTensor(f"tensor {len(team.here.shareds)}", thing, make_home(team.here)))
    else:
        raise TypeError(f"share() takes a module or a tensor of torch, not {type(thing).__name__}")
    return thing


def vectors(module: torch.nn.Module, what: str) -> tuple[Vector, Vector]:
    """The weights and the gradients of a shared module."""
    team = current_team(what)
    if module not in _modules or _modules[module][0] is not team:
        raise ValueError(f"{what}: {type(module).__name__} is not shared: call share() on it first")
    _, weights, gradients = _modules[module]
    return weights.parts[0], gradients.parts[0]


def _check_params(name: str, params: list[torch.Tensor], here: Any) -> list[torch.Tensor]:
    if not params:
        raise ValueError(f"share(): {name} has no parameters")
    for param in params:
        if not param.is_cpu or param.layout != torch.strided:
            raise TypeError(
                f"share(): {name} is on {param.device}: give dense tensors on the CPU; they are moved"
            )
    dtypes = {param.dtype for param in params}
    if len(dtypes) != 1 or dtypes == {torch.bfloat16}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise TypeError(f"share(): {name} has parameters of {found}: one dtype that NumPy has is needed")
    if here.gpu is not None and dtypes != {torch.float32}:
        raise TypeError(f"share(): {name} is {dtypes.pop()}: on GPUs shared tensors are float32")
    return params


def _add(team: Any, shared: Any) -> None:
    """Moves it to a place in blocks of all ranks."""
    value = shared.get()
    shared.place = make_places(team, [value.nbytes], shared.name)[0]
    known = team.known.add(shared)
    mine = known.view(team.here, team.rank, value.shape)
    mine[...] = value
    known.put(mine)


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
