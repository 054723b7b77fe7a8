"""Lazy arrays: tensors whose operations are recorded, and run as soon as their inputs are ready.

The shapes of results are known at once. An operation whose shapes depend on values runs at once.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.flow import graph, placement, private
from lockstep.flow.devices import Device
from lockstep.flow.instructions import (
    Instruction,
    SparseEntries,
    Storage,
    copy_on,
    draw_seed,
    fetching,
    in_storage,
    keeping_sizes,
    need_values,
    on_copies,
    run,
    stored,
    without_gradients,
)
from lockstep.flow.lanes import Operation
from lockstep.flow.recipes import (
    BY_GRADIENT_MODE,
    WRITES_STATISTICS,
    Layout,
    Operands,
    OperationTraits,
    Recipe,
    instead_of,
    known_recipe,
    make_recipe,
    traits_of,
)
from lockstep.flow.views import begin_change_of_shape, check_write, note_views

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@private.refusing_marks
class Array(torch.Tensor):
    """A torch.Tensor whose value is computed later. Shape and dtype are known at once; reading it waits."""

    memory: Storage
    copied: torch.UntypedStorage | None  # which the array stands for while C++ copies it
    __torch_function__: Any = private.no_torch_function
    __array_wrap__: Any = private.numpy_result

    @staticmethod
    def __new__(cls, storage: Storage, size: Any, stride: Any, offset: int, dtype: torch.dtype) -> "Array":
        layout = torch.strided if storage.cell.layout is not None else torch.sparse_coo
        where = storage.device.torch_device
        made: Array = private.make_wrapper(cls, size, stride, offset, dtype, where, layout)
        vars(made)["memory"] = storage
        return made

    def __init__(self, *_: Any) -> None:
        """Do nothing: __new__ has done everything."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return record(function, args, kwargs or {})

    @property
    def place(self) -> Device:
        """The device that holds it."""
        return self.memory.device

    @property
    def data(self) -> Any:
        """The array without its gradient's history, on the same memory. Autograd does not count writes."""
        return _alias(self, self.memory)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Replace its memory by another array's, as `module.to(dtype)` does."""
        if not isinstance(value, Array):
            raise UserError("the data of an array is an array: flow.array makes one of a tensor")
        placement.note_place(self)
        private.set_data(self, value)

    def wait(self) -> "Array":
        """Block until the value is computed, and return the array.

        Raises:
            OperationError: Computing it failed.
        """
        if self.memory.program is not None:
            self.memory.program.refuse("waiting for a value")
        writer = graph.writer_of(self.memory)
        if writer is not None:
            writer.wait()
        return self

    def tensor(self) -> torch.Tensor:
        """Return a copy as an ordinary tensor in host memory, once the value is computed.

        Raises:
            OperationError: Computing it failed.
        """
        program = placement.program_of([self])
        if program is not None:  # also for an array from before the capture: its value would be a constant
            program.refuse("reading a value")
        need_values("reading an array")
        value: torch.Tensor = run(fetching(self.memory, self.view_of_memory()), [self.memory]).take()
        return value

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a copy as a NumPy array, once the value is computed; `force` is ignored."""
        return self.tensor().numpy()

    def data_ptr(self) -> int:
        """Return the address of its value in its device's memory, once the value is computed.

        The address is valid until something writes the array.

        Raises:
            OperationError: Computing it failed.
        """
        if self.memory.program is not None:
            self.memory.program.refuse("asking where a value lies")
        need_values("the address of an array")
        value: torch.Tensor = self.wait().memory.cell.view(self.view_of_memory())
        return private.plainly(value.data_ptr)  # type: ignore[no-any-return]

    def __dlpack__(self, **keywords: Any) -> Any:
        """Export a copy in host memory."""
        return self.detach().tensor().__dlpack__(**keywords)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> Any:
        return torch.utils.dlpack.DLDeviceType.kDLCPU, 0

    def share_memory_(self) -> "Array":
        """Refuse: the memory belongs to the device."""
        raise UserError("the memory of an array can't be shared: share array.tensor()")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse: the memory belongs to the device."""
        raise UserError("an array has no storage of its own: array.tensor() is a copy that has one")

    def tolist(self) -> Any:
        """Return its numbers as nested lists, once the value is computed."""
        return self.tensor().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Array({tuple(self.shape)}, {self.dtype}, on {self.place.name})"

    def __format__(self, spec: str) -> str:
        """Format a single number as torch does, once it is computed; anything else by its `repr`."""
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __copy__(self) -> "Array":
        """Return another array on the same memory."""
        copy = self.detach().requires_grad_(self.requires_grad)
        vars(copy).update(private.marks(self))
        return private.as_parameter(copy) if isinstance(self, nn.Parameter) else copy  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Array":
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                memo[id(self)] = private.as_parameter(copy)
            else:  # torch copies neither gradients nor marks of parameters
                memo[id(self)] = copy
                vars(copy).update(deepcopy(private.marks(self), memo))
                copy.grad = deepcopy(self.grad, memo) if self.is_leaf else None
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle the ordinary tensor, or nn.Parameter, that it stands for, with its marks."""
        value = self.tensor().requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            value = nn.Parameter(value, self.requires_grad)
        vars(value).update(private.marks(self))
        return value.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def view_of_memory(self) -> Any:
        """Return its size, stride, offset and dtype if it is a part of its memory, else None."""
        whole = self.memory.cell.layout
        if whole is None:
            return None
        size, stride, offset, dtype = self.size(), self.stride(), self.storage_offset(), self.dtype
        if offset == 0 and size == whole[0] and stride == whole[1] and dtype is whole[2]:
            return None
        return size, stride, offset, dtype


def from_tensor(tensor: torch.Tensor, device: Device, name: str = "") -> Array:
    """Return a copy of a tensor on a device. The tensor is read before this returns.

    Raises:
        UserError: The tensor has no values.
    """
    storage = stored(tensor, device, name)
    layout = storage.cell.layout
    return Array(storage, tensor.size(), None if layout is None else layout[1], 0, tensor.dtype)


def array_leaves(tree: Any) -> list[Array]:
    """Return the arrays among a tree's leaves."""
    return [leaf for leaf in private.tree_leaves(tree) if isinstance(leaf, Array)]


def bring(tensor: torch.Tensor, device: Device) -> Array:
    """Return the array, or its copy in the device's memory, made once per version.

    Ordinary tensors are copied.
    """
    if type(tensor) is not Array:
        return from_tensor(placement.in_use(tensor), device)
    if tensor.memory.device.memory == device.memory:
        return tensor
    return _alias(tensor, copy_on(device, tensor.memory, placement.program_of([tensor])))


def _alias(array: Array, memory: Storage) -> Array:
    """Return an array of the same shape and place in a memory."""
    place = (None, 0) if memory.cell.layout is None else (array.stride(), array.storage_offset())
    return Array(memory, array.size(), *place, array.dtype)


def record(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Submit an operation to run later, and return arrays that stand for its results.

    An operation whose shapes depend on values runs now.

    Raises:
        CaptureError: A program that is being captured cannot have this operation.
        UserError: The operation writes an ordinary tensor.
        Exception: torch's own, for shapes that do not fit.
    """
    graph.check_not_ending()
    if private.is_traced():
        what = "a trace of torch's (make_fx, torch.func.linearize) would take an array for a constant"
        raise UserError(f"{placement.user_line()}: {what}: give it array.tensor() outside of flow.device")
    called, function = function, instead_of(function)
    kind = traits_of(function)
    if args and type(args[0]) in (int, float, complex) and (kind.view or called is not function):
        number = torch.from_numpy(np.asarray(args[0]))  # torch takes numbers for arithmetic only
        return record(called, (number, *args[1:]), kwargs)
    operands = Operands(kind, args, kwargs)
    is_copy = called is not function and torch.is_inference_mode_enabled()
    if is_copy and not all(tensor.is_inference() for tensor in operands.tensors):
        with private.inference_mode(False):  # to torch it is a view of a tensor with a version
            return record(function, args, kwargs)
    arrays = [tensor for tensor in operands.tensors if type(tensor) is Array]
    written = operands.written(kind)
    views = kind.view or kind.changes_shape
    if not arrays and (written or views or kind.refused or kind.aside or operands.is_meta()):
        return _ordinary(kind, written, partial(function, *args, **kwargs))
    if kind.name == "detach_":  # autograd has done it, and in a worker a part of the memory is a view
        return written[0]
    if kind.name == "set_" and len(args) == 2 and type(args[1]) is type(written[0]) is Array:
        written[0].data = args[1]
        return written[0]
    is_empty = kind.name == "set_" and type(written[0]) is Array and not written[0].numel()
    if is_empty and len(args) > 1 and isinstance(args[1], torch.UntypedStorage):
        written[0].data = from_tensor(in_storage(written[0].dtype, args[1:]), written[0].place)
        vars(written[0])["copied"] = args[1] if len(args) == 2 else None
        return written[0]
    if written or kind.refused:
        _check_writing(kind, written, arrays)
    if kind.name == "copy_" and vars(args[0]).get("copied") and vars(args[1]).get("copied"):
        # C++ copies storages as tensors, as for share_memory_ of an ordinary tensor
        _ordinary(kind, written, partial(private.plainly, args[0].copied.copy_, args[1].copied))
    if operands.are_for_meta():
        return operands.run_on_meta(function)
    if views and arrays[0].memory.cell.layout is not None:
        return _view(function, kind, args, kwargs, arrays[0])
    device, line, phase = placement.place(arrays, written[0] if written else None)
    if views:  # of a sparse array: writes into it must reach the array, and not a copy on this device
        device = arrays[0].place
    step = Instruction(kind.name, function, device)
    step.line, step.phase, step.kind = line, phase, kind
    if kind.random:
        step.seed = draw_seed(operands.generator)
        if "generator" in operands.keywords:
            operands.keywords["generator"] = None  # it gets a seeded one when it runs
    if kind.name.startswith("_foreach"):  # autograd counts the writes of its own kernels, which do not run
        torch.autograd.graph.increment_version(written)
    return _plan(step, kind, operands, written)


def _ordinary(kind: OperationTraits, written: list[Any], run_now: Callable[[], Any]) -> Any:
    """Run an operation without arrays now; a program would run it during the capture only."""
    program = placement.program_of(())
    if written and program is not None:
        what = f"{kind.name} writes an ordinary tensor of shape {tuple(written[0].shape)}"
        program.refuse(what, "make it an array before the capture")
    return run_now()


def _check_writing(kind: OperationTraits, written: list[Any], arrays: list[Array]) -> None:
    if kind.refused:
        raise UserError(f"{kind.name}: {kind.refused}")
    for tensor in written:
        if type(tensor) is not Array:
            what = f"{kind.name} writes an ordinary tensor of shape {tuple(tensor.shape)} among arrays"
            program = placement.program_of([each for each in written if type(each) is Array])
            if program is not None:
                program.refuse(what, "make it an array before the capture")
            raise UserError(
                f"{what}: make it an array (flow.array, flow.arrays(module)), or in `with flow.device`"
            )
        if tensor.place.memory != written[0].place.memory:
            raise UserError(
                f"{kind.name} writes arrays on {written[0].place.name} and {tensor.place.name}: they have "
                "memories of their own, so call it for each (an optimizer for each device, or foreach=False)"
            )
        check_write(kind.name, tensor, arrays, kind.changes_shape)


def _view(
    function: Any, kind: OperationTraits, args: Sequence[Any], kwargs: dict[str, Any], source: Array
) -> Any:
    """Return views of an array. torch's own function computes which part of the memory they are."""
    if kind.composite:  # one like `reshape` makes a view only if it can
        return function._op_dk(_COMPOSITE, *args, **kwargs)
    if kind.changes_shape:
        begin_change_of_shape(kind.name, source)
        private.plainly(function._op, *args, **kwargs)
        return source
    found = private.plainly(function._op, *args, **kwargs)
    made = [_part(source, part) for part in ([found] if isinstance(found, torch.Tensor) else found)]
    note_views(kind.name, source, made)
    return made[0] if isinstance(found, torch.Tensor) else made


def _part(source: Array, part: torch.Tensor) -> Array:
    if torch.is_inference_mode_enabled() is not source.is_inference():
        with private.inference_mode(source.is_inference()):  # a view has a version if its source has one
            return _part(source, part)
    return Array(source.memory, part.size(), part.stride(), part.storage_offset(), part.dtype)


def _plan(step: Instruction, kind: OperationTraits, operands: Operands, written: list[Array]) -> Any:
    """Bring the inputs to the device, predict the results, and submit the operation."""
    inputs = [bring(tensor, step.device) for tensor in operands.tensors]
    layouts = [array.memory.cell.layout for array in inputs]
    if "device" in operands.keywords:
        operands.keywords["device"] = step.device.torch_device
    step.template, step.keywords = operands.template, operands.keywords
    step.views = [array.view_of_memory() for array in inputs]
    if kind.sparse or None in layouts:
        return _plan_sparse(step, kind, operands, inputs, written)
    key = (step.function, step.device.torch_device, torch.get_default_dtype(), *operands.key)
    try:
        recipe = known_recipe(key) or make_recipe(
            key, step.function, operands.template, operands.keywords,
            [(a.size(), a.stride(), a.dtype, step.device.torch_device) for a in inputs],
        )  # fmt: skip
    except Exception as error:
        if not private.depends_on_values(error):
            raise
        return _run_now(step, operands, inputs, written)
    step.recipe = recipe
    # A composite's parts may compute with integers, or have other shapes than torch predicts for the whole.
    if kind.composite and (recipe.default is not None or kind.name == "embedding_bag"):
        return operands.run(partial(step.function._op_dk, _COMPOSITE))  # type: ignore[attr-defined]
    if recipe.default is not None:
        _keep_default(step, kind, recipe)
    if kind.name in BY_GRADIENT_MODE and not torch.is_grad_enabled():
        step.function = partial(without_gradients, step.function)
    if kind.overwriting and (step.views[0] is None or _is_reshaped(inputs[0])):
        step.overwrites = 0
    program = placement.program_of(inputs)
    made = [None if layout is None else _made(step, layout, program) for layout in recipe.layouts]
    submitted = _submit(program, step, inputs, written, [array for array in made if array is not None])
    if kind.check and isinstance(submitted, Operation):
        submitted.wait()  # a check has no result that could be read
    leaves = [leaf if array is None else array for leaf, array in zip(recipe.leaves, made, strict=True)]
    return _returned(kind, operands, recipe.structure, leaves)


def _is_reshaped(array: Array) -> bool:
    """Return whether an array has all elements of its memory, in another shape."""
    size, _, dtype = array.memory.cell.layout  # type: ignore[misc]
    return array.is_contiguous() and array.numel() == size.numel() and array.dtype is dtype


def _keep_default(step: Instruction, kind: OperationTraits, recipe: Recipe) -> None:
    """Let the operation use the present default dtype, whatever it is when the operation runs."""
    step.cast_to = recipe.default
    if kind.takes_dtype and recipe.layouts[0] is not None:
        step.keywords["dtype"] = recipe.layouts[0][2]


def _returned(kind: OperationTraits, operands: Operands, structure: Any, leaves: list[Any]) -> Any:
    """Return the results in torch's structure; a result that is an argument is that very object."""
    if structure is None:
        return leaves[0] if kind.same[0] is None else operands.at(kind.same[0])[0]
    returned = private.tree_unflatten(leaves, structure)
    if all(same is None for same in kind.same):
        return returned
    pairs = zip(kind.same, returned, strict=True)
    return tuple(own if same is None else operands.at(same)[0] for same, own in pairs)


def _plan_sparse(
    step: Instruction, kind: OperationTraits, operands: Operands, inputs: list[Array], written: list[Array]
) -> Any:
    """Record the making, copying and applying of sparse gradients; run any other operation on them now."""
    if written:
        submit(step, inputs, written, [])
        return written[0]
    if kind.name == "detach":
        return inputs[0]
    if kind.sparse:
        step.function = partial(on_copies, step.function)
        size: Any = next(
            p for p in reversed(step.template) if type(p) is list and all(type(n) is int for n in p)
        )
    elif kind.name in ("_coalesce", "clone", "_to_copy") and operands.tensors[0].layout is torch.sparse_coo:
        size = inputs[0].size()
    else:
        found = _run_now(step, operands, inputs, written)
        if kind.view and isinstance(found, Array):
            vars(found)["memory"] = SparseEntries(inputs[0].memory, found.memory.cell)
        return found
    dtype = step.keywords.get("dtype") or inputs[-1].dtype  # `_to_copy` may change it
    made = _new(step, None, inputs, size, dtype)
    submit(step, inputs, [], [made])
    return made


def _new(
    step: Instruction, layout: Layout | None, inputs: Sequence[Array], size: Any = None, dtype: Any = None
) -> Array:
    """Return an array without a value; without a layout, a sparse one of this size and dtype."""
    program = placement.program_of(inputs)
    if layout is None:
        return Array(Storage(step.device, None, program=program), size, None, 0, dtype)
    return _made(step, layout, program)


def _made(step: Instruction, layout: Layout, program: Any) -> Array:
    return Array(Storage(step.device, layout, "", program), layout[0], layout[1], 0, layout[2])


def _run_now(step: Instruction, operands: Operands, inputs: list[Array], written: list[Array]) -> Any:
    """Run an operation whose result depends on values, and wait for it."""
    if not any(type(tensor) is Array for tensor in operands.tensors):
        return operands.run(step.function)
    program = placement.program_of(inputs)
    if program is not None:
        program.refuse(f"{step.name} depends on values", "control flow, .item() and shapes must not")
    need_values(step.name)
    step.gives_result = True
    if written:
        step.function = partial(keeping_sizes, step.function)
    returned = run(step, [a.memory for a in inputs], [a.memory for a in written]).take()
    leaves, structure = private.tree_flatten(returned)
    made, alone = [_with_value(step, leaf) for leaf in leaves], isinstance(returned, torch.Tensor)
    assert step.kind is not None
    return _returned(step.kind, operands, None if alone else structure, made)


def _with_value(step: Instruction, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout not in (torch.strided, torch.sparse_coo):
        raise UserError(
            f"{step.line}: {step.name} makes a tensor of layout {value.layout}, which an array can't have: "
            "call it on array.tensor(), outside of `with flow.device`"
        )
    layout = (value.size(), value.stride(), value.dtype) if value.layout is torch.strided else None
    made = _new(step, layout, [], value.size(), value.dtype)
    made.memory.cell.value = value
    return made


def submit(step: Instruction, *arrays: Sequence[Array]) -> Any:
    """Submit an operation to the program that is being captured, or to the engine.

    Args:
        step: The operation.
        arrays: Its inputs, those of them that it writes, and the new arrays that it makes.
    """
    return _submit(placement.program_of(arrays[0]), step, *arrays)


def _submit(
    program: Any, step: Instruction, inputs: Sequence[Array], written: Sequence[Array], made: Sequence[Array]
) -> Any:
    memories = ([a.memory for a in inputs], [a.memory for a in written], [a.memory for a in made])
    if program is None:
        return run(step, *memories)
    program.see(inputs, [] if f"aten::{step.name}" in WRITES_STATISTICS else written)
    return program.add(step, *memories)
