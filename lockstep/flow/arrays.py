"""Lazy arrays: tensors whose operations are recorded, and run as soon as their inputs are there."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.flow import placement, private
from lockstep.flow.devices import Device
from lockstep.flow.engine import Variable, in_dry_run
from lockstep.flow.instructions import Cell, Instruction
from lockstep.flow.lanes import Operation
from lockstep.flow.recipes import Layout, Slot

_Module = TypeVar("_Module", bound=nn.Module)


class Storage(Variable):
    """The memory that an array and its views share, on one device.

    version: how often it has been written. program: the one that is being captured, if it stands for a value
    of that. copies: of it in other devices' memories, with their versions.
    """

    __slots__ = ("cell", "copies", "device", "program", "version")

    def __init__(self, device: Device, layout: Layout | None, name: str = "", program: Any = None) -> None:
        Variable.__init__(self, name)
        self.device, self.program, self.version = device, program, 0
        self.cell = Cell(layout)
        self.copies: dict[Any, tuple[int, Array]] = {}


class Array(torch.Tensor):
    """A torch.Tensor whose value comes later. Shape and dtype are known at once; reading it waits."""

    memory: Storage
    record: Callable[..., Any]  # recording.py's, which knows arrays; an import in each operation costs 1 us
    __torch_function__: Any = private.no_torch_function

    @staticmethod
    def __new__(cls, storage: Storage, size: Any, stride: Any, offset: int, dtype: torch.dtype) -> "Array":
        layout = torch.strided if storage.cell.layout is not None else torch.sparse_coo
        made: Array = private.make_wrapper(
            cls, size, stride, offset, dtype, storage.device.torch_device, layout
        )
        made.memory = storage
        return made

    def __init__(self, *_: Any) -> None:
        """All is done in __new__."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.record(function, args, kwargs or {})

    @property
    def place(self) -> Device:
        """The device where it lies."""
        return self.memory.device

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Makes it another array's, as `module.to(dtype)` does. Raises UserError for an ordinary tensor."""
        if not isinstance(value, Array):
            raise UserError("the data of an array is an array: flow.array makes one of a tensor")
        private.set_data(self, value)
        self.memory = value.memory

    def wait(self) -> "Array":
        """Until its value is there. Raises OperationError where it could not be made."""
        if self.memory.program is not None:
            self.memory.program.refuse("waiting for a value")
        if self.memory.writer is not None:
            self.memory.writer.wait()
        return self

    def tensor(self) -> torch.Tensor:
        """A copy as an ordinary tensor in ordinary memory, once it is there.

        Raises OperationError likewise.
        """
        if self.memory.program is not None:
            self.memory.program.refuse("reading a value")
        need_values("reading an array")
        value: torch.Tensor = run(fetching(self), [self.memory]).wait()
        return value

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A copy, once it is there; force is torch's and changes nothing here."""
        array: np.ndarray = self.tensor().numpy()
        return array

    def tolist(self) -> Any:
        return self.tensor().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Array({tuple(self.shape)}, {self.dtype}, on {self.place.name})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Array":
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                private.as_parameter(copy)
            memo[id(self)] = copy
        found: Array = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the ordinary tensor that it stands for."""
        return self.tensor().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def view_of_memory(self) -> Any:
        """What of its memory it is (size, stride, offset, dtype); None for all of it."""
        whole = self.memory.cell.layout
        if whole is None:
            return None
        size, stride, offset, dtype = self.size(), self.stride(), self.storage_offset(), self.dtype
        if offset == 0 and size == whole[0] and stride == whole[1] and dtype is whole[2]:
            return None
        return size, stride, offset, dtype


def need_values(what: str) -> None:
    """Raises UserError in a dry run."""
    if in_dry_run():
        raise UserError(f"{placement.user_line()}: {what} needs values, and a dry run makes none")


def fetching(array: Array) -> Instruction:
    """The operation that copies an array's value into ordinary memory."""
    step = Instruction("fetch", array.place.fetch, array.place, "fetch")
    step.template, step.views = [Slot(0)], [array.view_of_memory()]
    step.line, step.phase, step.gives_result = placement.user_line(), "fetch", True
    return step


def run(
    step: Instruction, reads: Sequence[Storage], writes: Sequence[Storage] = (), made: Sequence[Storage] = ()
) -> Operation:
    """Has an instruction run on these memories; `made` are those that hold nothing yet."""
    for storage in writes:
        storage.version += 1
    engine = placement.engine_of(step.device)
    function = partial(step.execute, [s.cell for s in reads], [s.cell for s in made])
    operation = engine.operation(function, engine.lane(step.device, step.lane), step.name)
    operation.line, operation.phase = step.line, step.phase
    if step.overwrites is not None:
        reads = [s for number, s in enumerate(reads) if number != step.overwrites]
    return engine.submit(operation, reads, [*writes, *made])


def array(data: Any, dtype: torch.dtype | None = None) -> Array:
    """A copy of numbers, a NumPy array or a tensor, on the current device."""
    if isinstance(data, Array):
        copy: Any = data.detach().clone()
        return copy  # type: ignore[no-any-return]
    with private.without_modes():
        tensor = torch.as_tensor(data, dtype=dtype)
    return from_tensor(tensor, placement.current_device())


def from_tensor(tensor: torch.Tensor, device: Device, name: str = "") -> Array:
    """The copy is made here and now: the tensor may change as soon as this returns."""
    with private.without_modes():
        copy = _copy(tensor.detach())
    layout = None if copy.layout is not torch.strided else (copy.size(), copy.stride(), copy.dtype)
    storage = Storage(device, layout, name)
    made = Array(storage, tensor.size(), None if layout is None else layout[1], 0, tensor.dtype)
    if device.memory == "host":
        storage.cell.value = copy
    else:
        step = Instruction("put", partial(device.put, copy), device, "communication")
        step.line, step.phase = placement.user_line(), "copy"
        run(step, [], [], [storage])
    return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """In ordinary memory.

    By this thread alone: torch would let the others of its pool help, and those keep cores busy for some
    milliseconds afterwards, which the devices' workers need.
    """
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    if not (plain and tensor.is_cpu):
        return tensor.to("cpu", copy=True)
    made = torch.empty_like(tensor)
    if made.stride() != tensor.stride():  # it has gaps
        return made.copy_(tensor)
    ctypes.memmove(made.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return made


def arrays(module: _Module) -> _Module:
    """Makes the module's parameters and buffers arrays on the current device, in place; returns the module.

    What is an array already stays as it is, where it is. Names are kept, for pictures of programs.
    """
    device, made = placement.current_device(), dict[int, Array]()
    for prefix, part in module.named_modules():
        for own in (part._parameters, part._buffers):
            for key, tensor in own.items():
                if tensor is None or isinstance(tensor, Array):
                    continue
                if id(tensor) not in made:
                    new = from_tensor(tensor, device, f"{prefix}.{key}".lstrip("."))
                    if isinstance(tensor, nn.Parameter):
                        private.as_parameter(new.requires_grad_(tensor.requires_grad))
                    made[id(tensor)] = new
                own[key] = made[id(tensor)]
    return module


def _factory(make: Callable[[], torch.Tensor]) -> Array:
    from lockstep.flow.recording import recording_everything

    with recording_everything():
        made = make()
    assert isinstance(made, Array)
    return made


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Array:
    return _factory(lambda: torch.zeros(tuple(shape), dtype=dtype))


def ones(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Array:
    return _factory(lambda: torch.ones(tuple(shape), dtype=dtype))


def randn(shape: Sequence[int], mean: float = 0.0, std: float = 1.0) -> Array:
    """Normally distributed, float32."""
    return _factory(lambda: torch.empty(tuple(shape)).normal_(mean, std))


def randb(shape: Sequence[int], p: float) -> Array:
    """One with probability p, else zero, float32."""
    return _factory(lambda: torch.empty(tuple(shape)).bernoulli_(p))


def call(
    function: Callable[..., Any], *arguments: Any, writes: Sequence[Array] = (), device: Device | None = None
) -> Operation:
    """Has any Python function run beside the program, on the real tensors of the arrays among its arguments.

    arguments: also dictionaries, lists and tuples with arrays. writes: those of the arrays that it changes;
    all others it only reads, and it keeps none. It runs on a lane of its own of the device (default: the
    current one), so the program goes on; what writes its arrays waits for it. `.result()` waits for what it
    returns. Raises UserError where `writes` has what is not among the arguments.
    """
    from lockstep.flow.recording import record_call

    return record_call(function, arguments, writes, device or placement.current_device())


def array_leaves(tree: Any) -> list[Array]:
    return [leaf for leaf in private.tree_leaves(tree) if isinstance(leaf, Array)]


def need_arrays(values: Sequence[Any], among: Sequence[Array]) -> None:
    """Raises UserError where one of the values is not among the arrays."""
    for value in values:
        if not any(value is each for each in among):
            raise UserError(f"flow.call: writes has {value!r}, which is not an array among the arguments")
