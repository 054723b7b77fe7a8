"""Torch tensors that all ranks share: one, or a module's parameters, gradients or buffers, as one vector."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lockstep.exchange import Op
from lockstep.synk import rows
from lockstep.synk.blocks import BlockTable
from lockstep.synk.context import RankContext
from lockstep.synk.shareds import Shared
from lockstep.synk.storage import (
    DeviceStorage,
    HostStorage,
    SharedStorage,
    are_plain,
    check_dtype,
    choose_rows,
    make_storage,
    memory_state,
)


@dataclass(frozen=True)
class SharedDescription:
    """The description from which a worker makes its copy of a shared variable.

    Attributes:
        kind: Class of the variable.
        content: Argument of its `from_content`.
    """

    kind: "type[TensorShared]"
    number: int
    name: str
    content: Any

    def make(self, context: RankContext) -> Shared:
        """Return a copy of the described variable for a rank, with the same number."""
        shared = self.kind.from_content(context, self.name, self.content)
        shared.number = self.number
        return shared


class TensorShared(Shared):
    """A shared variable that is a tensor or a vector of tensors; `storage` is its memory on this rank."""

    kind = "callable"
    is_array = True

    def __init__(self, name: str, parts: list[Any], storage: SharedStorage) -> None:
        self.name, self.parts, self.storage = name, parts, storage

    @abstractmethod
    def versions(self) -> Any:
        """Return a value that changes when torch writes to the variable, or it gets other memory."""

    def describe(self) -> SharedDescription:
        """Return the description from which a worker makes the variable."""
        return SharedDescription(type(self), self.number, self.name, self.content())

    @abstractmethod
    def content(self) -> Any:
        """Return the argument of `from_content`."""

    def attributes(self) -> list[tuple[Any, dict[str, Any]]]:
        tensors = [part for part in self.parts if isinstance(part, torch.Tensor)]
        return [(tensor, vars(tensor)) for tensor in tensors if vars(tensor)]

    @classmethod
    @abstractmethod
    def from_content(cls, context: RankContext, name: str, content: Any) -> "TensorShared":
        """Make the variable on another rank; UseSlots sets its value later."""

    def move_to_slot(self, blocks: BlockTable, rank: int) -> tuple[int, ...]:
        if isinstance(self.storage, DeviceStorage):
            return self._mirror(blocks, rank)
        return super().move_to_slot(blocks, rank)

    def assign(self, value: np.ndarray) -> None:
        if isinstance(self.storage, DeviceStorage):
            self.put(value)
        else:
            super().assign(value)

    @property
    def reduces_on_device(self) -> bool:
        return isinstance(self.storage, DeviceStorage) and self.dtype == np.float32

    def leave_gpu(self) -> None:
        self.storage.run(self._move_to_host)

    def release_gpu(self) -> None:
        self.storage.release()
        self.storage = HostStorage()

    @torch.inference_mode(False)
    def _move_to_host(self) -> None:
        for tensor in self.parts:
            if isinstance(tensor, torch.Tensor):
                tensor.data = tensor.data.to("cpu", copy=True)

    def _mirror(self, blocks: BlockTable, rank: int) -> tuple[int, ...]:
        """Copy a value on a GPU to its slot in host memory."""
        if self.slot is not None and self.n_bytes <= self.slot.n_bytes:
            self.view(blocks, rank, self.shape)[...] = self.get()
        return self.shape


class SharedTensor(TensorShared):
    """A shared tensor. Its memory changes (`Tensor.data`), but the tensor object stays the same."""

    def __init__(self, name: str, tensor: torch.Tensor, storage: SharedStorage) -> None:
        super().__init__(name, [tensor], storage)
        self._dtype = tensor.dtype
        self.put(np.array(tensor.detach().numpy()))

    def sync_objects(self) -> Sequence[Callable[[], None]]:
        check_dtype(self.name, self.parts[0], self._dtype)
        if self.parts[0].data_ptr() == self._address and not self.parts[0].is_conj():
            return ()
        with torch.inference_mode(False):  # the program has set `data`, maybe to a view of an input
            return [partial(self._point_to, self.parts[0].detach().clone())]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self.parts[0].dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts[0].shape)

    def get(self) -> np.ndarray:
        return self.storage.read(self.parts[0].detach().resolve_conj())

    def put(self, value: np.ndarray) -> None:
        self._point_to(self.storage.store(value))

    def save(self) -> Any:
        return super().save() if isinstance(self.storage, HostStorage) else self.parts[0].detach()

    def select_rows(self, saved: Any, choice: rows.Choice) -> None:
        if isinstance(self.storage, HostStorage):
            super().select_rows(saved, choice)
        else:
            self.storage.run(lambda: self._point_to(choose_rows(saved, choice)))

    def restore(self, saved: Any) -> None:
        if isinstance(self.storage, HostStorage):
            super().restore(saved)
        else:
            self._point_to(saved)

    def all_reduce_on_device(self, op: Op, weight: float | None) -> None:
        self.storage.reduce(self.parts[0].detach(), op, weight)

    def _point_to(self, tensor: torch.Tensor) -> None:
        self.parts[0].data = tensor
        self._address = tensor.data_ptr()

    def versions(self) -> Any:
        return memory_state(self.parts[0])

    def content(self) -> "TensorDescription":
        tensor = self.parts[0]
        grad = tensor.grad.detach().cpu() if tensor.is_leaf and tensor.grad is not None else None
        return replace(TensorDescription.of(tensor), grad=grad)

    @classmethod
    def from_content(cls, context: RankContext, name: str, content: "TensorDescription") -> "SharedTensor":
        return cls(name, content.make(), make_storage(context))


class Vector:
    """A handle for all parameters of a module, or for their gradients, as one vector."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class _FlatVector(TensorShared):
    """A vector whose parts are the tensors of a module's parameters."""

    params: list[torch.Tensor]
    shapes: list[torch.Size]  # of the parameters at share()
    _flat: torch.Tensor

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self._flat.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._flat.shape)

    def get(self) -> np.ndarray:
        self.storage.run(self._collect)
        return self.storage.read(self._flat)

    def put(self, value: np.ndarray) -> None:
        self._flat = self.storage.store(value)
        for param, part in zip(self.params, self._cut(), strict=True):
            self._point(param, part)

    def prepare_all_reduce(self) -> None:
        self.storage.run(self._collect)

    def all_reduce_on_device(self, op: Op, weight: float | None) -> None:
        self.storage.all_reduce(self._flat, op, weight)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self.shape:
            raise ValueError(
                f"{self.name} have {self.shape[0]} elements in all, the value has {shape[0]}. Give as many"
            )

    def _cut(self) -> list[torch.Tensor]:
        """Return the parts of the vector in the shapes of the parameters. No copies."""
        parts = self._flat.split_with_sizes([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @abstractmethod
    def _point(self, param: torch.Tensor, part: torch.Tensor) -> None:
        """Attach a part of the vector to its parameter."""

    @abstractmethod
    def _collect(self) -> None:
        """Copy back into the vector what was moved out of it."""


class SharedWeights(_FlatVector):
    """The parameters of a module as one vector."""

    def __init__(self, name: str, params: Sequence[torch.Tensor], storage: SharedStorage) -> None:
        super().__init__(name, [Vector(name), *params], storage)
        self.params, self.shapes = list(params), [param.shape for param in params]
        self.put(np.concatenate([param.detach().numpy().reshape(-1) for param in params]))

    def versions(self) -> Any:
        return list(map(memory_state, self.params))

    def sync_objects(self) -> Sequence[Callable[[], None]]:
        if {param.dtype for param in self.params} != {self._flat.dtype}:
            for param in self.params:
                check_dtype(self.name, param, self._flat.dtype)
        return self._find_moved(strict=False)

    def put(self, value: np.ndarray) -> None:
        super().put(value)
        self._addresses = [param.data_ptr() for param in self.params]

    def content(self) -> "list[TensorDescription]":
        return [TensorDescription.of(param) for param in self.params]

    @classmethod
    def from_content(
        cls, context: RankContext, name: str, content: "list[TensorDescription]"
    ) -> "SharedWeights":
        return cls(name, [description.make() for description in content], make_storage(context))

    def _point(self, param: torch.Tensor, part: torch.Tensor) -> None:
        param.data = part

    def _collect(self) -> None:
        for put_back in self._find_moved():
            put_back()

    def _find_moved(self, strict: bool = True) -> list[Callable[[], None]]:
        """Return functions that put back what was moved out of the vector, e.g. by module.to().

        Args:
            strict: Raise ValueError if a parameter has another shape now; else leave it where it is.
        """
        addresses = list(map(torch.Tensor.data_ptr, self.params))
        if addresses == self._addresses and are_plain(self.params, self.shapes):
            return []  # the usual case, at every call
        fitting: list[Callable[[], None]] = []
        parts = self._cut()
        for index, (param, address) in enumerate(zip(self.params, self._addresses, strict=True)):
            if param.data_ptr() == address and are_plain([param], [self.shapes[index]]):
                continue
            now, before = tuple(param.shape), tuple(self.shapes[index])
            if now == before:
                fitting.append(partial(_put_in, param, parts[index], param.detach().clone()))
            elif strict:
                raise ValueError(f"{self.name}: a tensor of shape {now} had shape {before} at share()")
        return fitting


_Place = tuple[weakref.ref[torch.nn.Module], str]  # a module that has a buffer, and the buffer's name there


class SharedBuffers(SharedWeights):
    """The buffers of a module that have one dtype, as one vector.

    They need not be declared as updates: a sliced call continues with them from slice to slice. A buffer that
    a module replaces (`self.mean = ...`) is copied into the vector and put back, or kept if shapes differ.
    """

    def __init__(self, name: str, params: Sequence[torch.Tensor], storage: SharedStorage) -> None:
        # Indices of buffers, with all places of the buffer in one copy of the network.
        self._owners: list[tuple[int, list[_Place]]] = []
        super().__init__(name, params, storage)

    def versions(self) -> Any:
        return None

    def add_owners(self, modules: Iterable[torch.nn.Module]) -> None:
        named = [(weakref.ref(module), pair) for module in modules for pair in module._buffers.items()]
        for index, param in enumerate(self.params):
            places = [(owner, name) for owner, (name, buffer) in named if buffer is param]
            self._owners.append((index, places))

    def sync_objects(self) -> Sequence[Callable[[], None]]:
        return [*super().sync_objects(), *self._find_replaced(strict=False)]

    def put(self, value: np.ndarray) -> None:
        for put_back in self._find_replaced(copies=False):  # the value may lie in their memory already
            put_back()
        super().put(value)

    def _collect(self) -> None:
        super()._collect()
        for put_back in self._find_replaced():
            put_back()

    def leave_gpu(self) -> None:
        for put_back in self._find_replaced(strict=False):
            put_back()
        self._owners = []  # what was replaced by another shape is the module's own from now on
        super().leave_gpu()

    def _find_replaced(self, copies: bool = True, strict: bool = True) -> list[Callable[[], None]]:
        """Return functions that put replaced buffers back into their modules.

        Args:
            copies: Copy the values of the replacements.
            strict: Raise ValueError if a replacement has another shape or dtype, or if a buffer with several
                names was replaced under one of them; else leave the replacements in place.
        """
        fitting: list[Callable[[], None]] = []
        for param, places in self._replaced():
            values = [module._buffers.get(name) for module, name in places]
            new = values[0]
            is_one = all(value is new for value in values)
            if is_one and new is not None and (new.shape, new.dtype) == (param.shape, param.dtype):
                fitting.append(partial(_register, param, new.detach().clone() if copies else None, places))
            elif strict:
                raise ValueError(self._describe_replacement(param, new, [name for _, name in places], is_one))
        return fitting

    def _replaced(self) -> Iterator[tuple[torch.Tensor, list[tuple[torch.nn.Module, str]]]]:
        """Yield each buffer that a copy of the network has replaced, and its places in that copy."""
        for index, owners in self._owners:
            param = self.params[index]
            places = [(module, name) for owner, name in owners if (module := owner()) is not None]
            if any(module._buffers.get(name) is not param for module, name in places):
                yield param, places

    def _describe_replacement(
        self, param: torch.Tensor, new: torch.Tensor | None, names: list[str], is_one: bool
    ) -> str:
        """Return the error of a replacement that does not fit into the vector."""
        if not is_one:
            return (
                f"{self.name}: {' and '.join(names)} were one tensor at share(), and one of them was "
                "replaced. Register a tensor for each"
            )
        before = f"{tuple(param.shape)} and {param.dtype}"
        now = None if new is None else f"one of {tuple(new.shape)} and {new.dtype}"
        return (
            f"{self.name}: {names[0]}, of {before}, was replaced by {now}. "
            "Collectives need its former shape and dtype"
        )


class SharedGradients(_FlatVector):
    """The gradients of a module's parameters as one vector.

    A parameter without a gradient has zeros there, but its `grad` stays None: an optimizer would otherwise
    apply its weight decay and momentum to frozen and unused parameters.
    """

    def __init__(self, name: str, weights: SharedWeights, storage: SharedStorage) -> None:
        super().__init__(name, [Vector(name)], storage)
        self.weights, self.params, self.shapes = weights, weights.params, weights.shapes
        self._flat = self.storage.store(np.zeros(weights.shape, weights.dtype))
        self.storage.run(self._collect)

    def versions(self) -> Any:
        return [None if p.grad is None else (id(p.grad), memory_state(p.grad)) for p in self.params]

    def content(self) -> int:
        return self.weights.number

    @classmethod
    def from_content(cls, context: RankContext, name: str, content: int) -> "SharedGradients":
        weights = context.shareds[content]
        assert isinstance(weights, SharedWeights)
        return cls(name, weights, make_storage(context))

    def parts_without_value(self) -> frozenset[int]:
        return frozenset(index for index, param in enumerate(self.params) if param.grad is None)

    def set_parts_without_value(self, indices: frozenset[int]) -> None:
        if indices == self.parts_without_value():
            return
        for index, (param, part) in enumerate(zip(self.params, self._cut(), strict=True)):
            param.grad = None if index in indices else part

    def assign(self, value: np.ndarray) -> None:
        """Set the value; a missing gradient appears where the value is not zero."""
        super().assign(value)
        if missing := self.parts_without_value():
            parts = self._cut()
            self.set_parts_without_value(frozenset(index for index in missing if not parts[index].any()))

    @torch.inference_mode(False)
    def _move_to_host(self) -> None:
        """Copy the gradients one by one: backward() may have left some, or sparse ones, outside the vector.

        The parameters must be in host memory, because torch refuses a gradient on another device.
        """
        for param in self.params:
            if param.grad is not None:
                param.grad = param.grad.detach().to("cpu", copy=True)

    def _point(self, param: torch.Tensor, part: torch.Tensor) -> None:
        if param.grad is not None:
            param.grad = part

    def _collect(self) -> None:
        pairs = list(zip(self.params, self._cut(), strict=True))
        for (param, part), value in zip(pairs, [self._moved(*pair) for pair in pairs], strict=True):
            if param.grad is None:
                part.zero_()
            elif value is not None:
                part.copy_(value.contiguous())
                param.grad = part

    def _moved(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter if it is not its part; a copy if it is the part of another."""
        if (grad := param.grad) is None:
            return None
        if grad.layout != torch.strided:
            raise TypeError(
                f"{self.name}: a gradient of shape {tuple(param.shape)} is sparse, and a vector of "
                "gradients is dense. Make the module with sparse=False"
            )
        if grad.data_ptr() == part.data_ptr() and are_plain([grad], [part.shape]):
            return None
        is_inside = 0 <= grad.data_ptr() - self._flat.data_ptr() < self._flat.nbytes
        return grad.detach().clone() if is_inside else grad.detach()


def _put_in(param: torch.Tensor, part: torch.Tensor, value: torch.Tensor) -> None:
    part.copy_(value)
    param.data = part


def _register(
    param: torch.Tensor, value: torch.Tensor | None, places: list[tuple[torch.nn.Module, str]]
) -> None:
    """Register a buffer in its modules again, with a value if one is given."""
    if value is not None:
        param.data.copy_(value)
    for module, name in places:
        module._buffers[name] = param


@dataclass(frozen=True)
class TensorDescription:
    """The description of a tensor from which a worker makes its copy."""

    kind: type[torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    grad: torch.Tensor | None = None  # those of a module are a variable, SharedGradients

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorDescription":
        """Return the description of a tensor."""
        return cls(type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        """Return a tensor of zeros."""
        zeros = torch.zeros(self.shape, dtype=self.dtype)
        tensor = torch.Tensor._make_subclass(self.kind, zeros, self.requires_grad)
        tensor.grad = self.grad
        return tensor
