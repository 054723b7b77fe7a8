"""Records torch's operations on arrays: what they will make is known at once, and they run when they can."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep.errors import UserError
from lockstep.flow import placement, private
from lockstep.flow.arrays import Array, Storage, array, array_leaves, need_arrays, need_values, run
from lockstep.flow.devices import Device
from lockstep.flow.instructions import Instruction, draw_seed
from lockstep.flow.lanes import Operation
from lockstep.flow.operands import Operands
from lockstep.flow.recipes import Kind, Layout, Slot, fill, instead_of, kind_of, known_recipe, make_recipe
from lockstep.flow.transfers import bring


class _Here(threading.local):
    everything = False  # whether Recording is on


_here = _Here()


class _Mode(private.DispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return record(function, args, kwargs or {})


@contextmanager
def recording_everything() -> Iterator[None]:
    """Inside, operations on ordinary tensors and factories are recorded, too."""
    if _here.everything:  # one is enough; a second would see what the first does
        yield
        return
    _here.everything = True
    try:
        with _Mode(), _Copying():  # type: ignore[no-untyped-call]
            yield
    finally:
        _here.everything = False


class _Copying(TorchFunctionMode):
    """Makes deep copies arrays: torch's own would put an ordinary tensor's memory under an array."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = array(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return function(*args, **(kwargs or {}))


@contextmanager
def device(place: Device) -> Iterator[Device]:
    """Inside, results lie on this device, and what torch makes are arrays.

    Raises UserError for what is no device.
    """
    with placement.on(place), recording_everything():
        yield place


@contextmanager
def capturing(program: Any) -> Iterator[None]:
    """Inside, this thread's operations become the program's and do not run."""
    with placement.capturing(program), recording_everything():
        yield


def record(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Has an operation run later, and returns arrays that stand for what it will make.

    What depends on values is waited for. Raises what torch raises for shapes that do not fit, CaptureError
    for what a program can't have, and UserError for a write into an ordinary tensor.
    """
    function = instead_of(function)
    kind = kind_of(function)
    operands = Operands(kind, args, kwargs)
    written = [tensor for place in kind.writes for tensor in operands.at(place)]
    views = kind.view or kind.changes_shape
    if not operands.arrays and (written or views or kind.refused or kind.aside):
        return _ordinary(kind, written, partial(function, *args, **kwargs))
    if written or kind.refused:
        _check_writing(kind, written)
    if views and operands.arrays[0].memory.cell.layout is not None:
        return _view(function, kind, args, kwargs, operands.arrays[0])
    device, line, phase = placement.place(operands.arrays, written[0] if written else None)
    step = Instruction(kind.name, function, device)
    step.line, step.phase, step.kind = line, phase, kind
    if kind.random:
        step.seed = draw_seed(operands.keywords.get("generator"))
        if "generator" in operands.keywords:
            operands.keywords["generator"] = None  # it gets one with the seed when it runs
    return _plan(step, kind, operands, written)


def _ordinary(kind: Kind, written: list[Any], run_now: Callable[[], Any]) -> Any:
    """Runs at once; a program that is captured would do it now and never again."""
    program = placement.program_of(())
    if written and program is not None:
        what = f"{kind.name} writes an ordinary tensor of shape {tuple(written[0].shape)}"
        program.refuse(what, "make it an array before the capture")
    return run_now()


def _check_writing(kind: Kind, written: list[Any]) -> None:
    if kind.refused:
        raise UserError(f"{kind.name}: an array can't be given other memory; make a new array")
    for tensor in written:
        if type(tensor) is not Array:
            what = f"{kind.name} writes an ordinary tensor of shape {tuple(tensor.shape)} among arrays"
            program = placement.program_of([each for each in written if type(each) is Array])
            if program is not None:
                program.refuse(what, "make it an array before the capture")
            raise UserError(
                f"{what}: make it an array (flow.array, flow.arrays(module)), or make it inside "
                "`with flow.device`"
            )
        if tensor.place.memory != written[0].place.memory:
            raise UserError(
                f"{kind.name} writes arrays on {written[0].place.name} and {tensor.place.name}: they have "
                "memories of their own, so call it for each (an optimizer for each device, or foreach=False)"
            )


def _view(function: Any, kind: Kind, args: Sequence[Any], kwargs: dict[str, Any], source: Array) -> Any:
    """Views are no operations: torch's own function tells which part of the memory one is."""
    with private.below_dispatch():
        made = function(*args, **kwargs)
    if kind.changes_shape:
        return source
    if isinstance(made, torch.Tensor):
        return _part(source, made)
    return [_part(source, part) for part in made]


def _part(source: Array, part: torch.Tensor) -> Array:
    return Array(source.memory, part.size(), part.stride(), part.storage_offset(), part.dtype)


def _plan(step: Instruction, kind: Kind, operands: Operands, written: list[Array]) -> Any:
    """Finds out what comes out, and submits it."""
    inputs = [bring(tensor, step.device) for tensor in operands.tensors]
    layouts = [array.memory.cell.layout for array in inputs]
    if "device" in operands.keywords:
        operands.keywords["device"] = step.device.torch_device
    step.template, step.keywords = operands.template, operands.keywords
    step.views = [array.view_of_memory() for array in inputs]
    if kind.sparse or None in layouts:
        return _plan_sparse(step, kind, operands, inputs, written)
    key = (step.function, step.device.torch_device, *operands.key)
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
    if kind.overwriting and step.views[0] is None:
        step.overwrites = 0
    program = placement.program_of(inputs)
    made = [None if layout is None else _made(step, layout, program) for layout in recipe.layouts]
    submitted = _submit(program, step, inputs, written, [array for array in made if array is not None])
    if kind.check and isinstance(submitted, Operation):
        submitted.wait()  # it is a check: nobody could read what it makes
    leaves = [leaf if array is None else array for leaf, array in zip(recipe.leaves, made, strict=True)]
    return _returned(kind, operands, recipe.structure, leaves)


def _returned(kind: Kind, operands: Operands, structure: Any, leaves: list[Any]) -> Any:
    """What is one of the arguments is returned as that very object."""
    if structure is None:
        return leaves[0] if kind.same[0] is None else operands.at(kind.same[0])[0]
    returned = private.tree_unflatten(leaves, structure)
    if all(same is None for same in kind.same):
        return returned
    pairs = zip(kind.same, returned, strict=True)
    return tuple(own if same is None else operands.at(same)[0] for same, own in pairs)


def _plan_sparse(
    step: Instruction, kind: Kind, operands: Operands, inputs: list[Array], written: list[Array]
) -> Any:
    """Gradients of embeddings: making, copying and applying them is recorded; whatever else, waited for."""
    if written:
        submit(step, inputs, written, [])
        return written[0]
    if kind.name == "detach":
        return inputs[0]
    if kind.sparse:
        size: Any = next(
            p for p in reversed(step.template) if type(p) is list and all(type(n) is int for n in p)
        )
    elif kind.name in ("_coalesce", "clone", "_to_copy"):
        size = inputs[0].size()
    else:
        return _run_now(step, operands, inputs, written)
    made = _new(step, None, inputs, size, inputs[-1].dtype)
    submit(step, inputs, [], [made])
    return made


def _new(
    step: Instruction, layout: Layout | None, inputs: Sequence[Array], size: Any = None, dtype: Any = None
) -> Array:
    """An array without a value. layout: None for a sparse tensor, of a size and dtype."""
    program = placement.program_of(inputs)
    if layout is None:
        return Array(Storage(step.device, None, program=program), size, None, 0, dtype)
    return _made(step, layout, program)


def _made(step: Instruction, layout: Layout, program: Any) -> Array:
    return Array(Storage(step.device, layout, "", program), layout[0], layout[1], 0, layout[2])


def _run_now(step: Instruction, operands: Operands, inputs: list[Array], written: list[Array]) -> Any:
    """What comes out depends on values: it runs, is waited for, and then the program goes on."""
    if not operands.arrays:
        return operands.run(step.function)
    program = placement.program_of(inputs)
    if program is not None:
        program.refuse(f"{step.name} depends on values", "control flow, .item() and shapes must not")
    need_values(step.name)
    step.gives_result = True
    returned = run(step, [a.memory for a in inputs], [a.memory for a in written]).wait()
    return private.tree_map(partial(_with_value, step), returned)


def _with_value(step: Instruction, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    layout = (value.size(), value.stride(), value.dtype) if value.layout is torch.strided else None
    made = _new(step, layout, [], value.size(), value.dtype)
    made.memory.cell.value = value
    return made


def submit(step: Instruction, *arrays: Sequence[Array]) -> Any:
    """To the program that is captured, or to the engine. arrays: inputs, written, made."""
    return _submit(placement.program_of(arrays[0]), step, *arrays)


def _submit(
    program: Any, step: Instruction, inputs: Sequence[Array], written: Sequence[Array], made: Sequence[Array]
) -> Any:
    memories = ([a.memory for a in inputs], [a.memory for a in written], [a.memory for a in made])
    if program is None:
        return run(step, *memories)
    program.see(inputs)
    return program.add(step, *memories)


def record_call(
    function: Callable[..., Any], arguments: Any, writes: Sequence[Array], place: Device
) -> Operation:
    """See flow.call."""
    leaves, structure = private.tree_flatten(arguments)
    among = array_leaves(leaves)
    need_arrays(writes, among)
    inputs = [bring(array, place) for array in among]
    for target in writes:
        if target.place.memory != place.memory:
            raise UserError(
                f"flow.call: it writes an array on {target.place.name}: it runs there, not on {place.name}"
            )

    numbers = iter(range(len(inputs)))
    parts = [
        Slot(next(numbers)) if isinstance(leaf, Array) else leaf for leaf in leaves
    ]  # it keeps no arrays

    def on_values(*values: torch.Tensor) -> Any:
        return function(*private.tree_unflatten(fill(parts, values), structure))

    step = Instruction(getattr(function, "__name__", "call"), on_values, place, "call")
    step.template, step.views = [Slot(n) for n in range(len(inputs))], [a.view_of_memory() for a in inputs]
    step.line, step.phase, step.gives_result = placement.user_line(), "call", True
    operation: Operation = submit(step, inputs, list(writes), [])
    return operation


Array.record = staticmethod(record)
