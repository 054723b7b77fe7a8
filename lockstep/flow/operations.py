"""Operations of our own: Python functions that are recorded as torch's operations are, on any device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import placement, private
from lockstep.flow.arrays import Array, array_leaves, bring, submit
from lockstep.flow.devices import Device
from lockstep.flow.instructions import Instruction, Storage
from lockstep.flow.lanes import Operation
from lockstep.flow.recipes import ArgumentSlot, Recipe, fill
from lockstep.flow.views import check_write


def operation(
    name: str,
    function: Callable[..., Any],
    device: Device,
    inputs: Sequence[Array],
    *,
    written: Sequence[Array] = (),
    made: Sequence[Array] = (),
    lane: str = "communication",
    phase: str = "merge",
) -> Any:
    """Run function(*values of the inputs) on a device that holds all inputs.

    Args:
        written: The inputs that it changes.
        made: New arrays, for the tuple that the function returns.
    """
    views = [array.view_of_memory() for array in inputs]
    step = Instruction(name, function, device, lane).on_inputs(views, phase)
    if made:
        structure = private.tree_flatten(tuple(range(len(made))))[1]
        promised = [array.memory.cell.layout for array in made]
        if all(layout is not None for layout in promised):
            step.recipe = Recipe(list(promised), [None] * len(made), structure)
        else:
            assert len(made) == 1, "a sparse array is made alone"
    return submit(step, list(inputs), list(written), list(made))


def new(device: Device, size: Sequence[int], dtype: torch.dtype, inputs: Sequence[Array]) -> Array:
    """Return a contiguous array without a value, for an operation on these inputs to fill."""
    shape = torch.Size(size)
    with private.without_modes():
        stride = torch.empty(shape, device="meta").stride()
    storage = Storage(device, (shape, stride, dtype), program=placement.program_of(inputs))
    return Array(storage, shape, stride, 0, dtype)


def new_sparse(device: Device, like: Array) -> Array:
    """Return a sparse array without a value."""
    storage = Storage(device, None, program=placement.program_of([like]))
    return Array(storage, like.size(), None, 0, like.dtype)


def call(
    function: Callable[..., Any], *arguments: Any, writes: Sequence[Array] = (), device: Device | None = None
) -> Operation:
    """Run a Python function as an operation, on the real tensors of the arrays among its arguments.

    It runs on a lane for calls, so the program continues; operations that write its arrays wait for it.
    `.result()` of the returned operation waits for the function's result.

    Args:
        arguments: May be dictionaries, lists and tuples with arrays. The function must keep none of the
            tensors. Ordinary tensors are copied at once.
        writes: The arrays that it changes; it only reads the others.
        device: Default: the current device.

    Raises:
        UserError: `writes` has something that is not among the arguments, or `device` is not a device.
    """
    if not callable(function):
        raise UserError(f"flow.call: {function!r} is not a function")
    place = placement.current_device() if device is None else device
    if not isinstance(place, Device):
        raise UserError(f"flow.call: {place!r} is not a device: flow.cpus(n) and flow.cuda(i) make them")
    leaves, structure = private.tree_flatten(arguments)
    among = array_leaves(leaves)
    _check_writes(writes, among)
    inputs = [bring(array, place) for array in among]
    for target in writes:
        if target.place.memory != place.memory:
            raise UserError(
                f"flow.call: it writes an array on {target.place.name}: it runs there, not on {place.name}"
            )

    numbers = iter(range(len(inputs)))
    ordinary = _copies_of_tensors(leaves)
    # It keeps no arrays.
    parts = [
        ArgumentSlot(next(numbers)) if isinstance(leaf, Array) else ordinary.get(id(leaf), leaf)
        for leaf in leaves
    ]

    def on_values(*values: torch.Tensor) -> Any:
        # It gets tensors of its own on the memory: a later call must not see a gradient or another shape.
        own = [value.detach() for value in values]
        return function(*private.tree_unflatten(fill(parts, own), structure))

    step = Instruction(getattr(function, "__name__", "call"), on_values, place, "call")
    step.on_inputs([array.view_of_memory() for array in inputs], "call").gives_result = True
    for target in writes:
        check_write("flow.call", target, writes)
    torch.autograd.graph.increment_version(list(writes))  # as torch's own in-place operations do
    operation: Operation = submit(step, inputs, list(writes), [])
    return operation


def _copies_of_tensors(leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return copies of the ordinary tensors by id: an optimizer's step counts change before the call runs."""
    with private.without_modes():
        return {
            id(leaf): leaf.detach().clone()
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Array)
        }


def _check_writes(values: Sequence[Any], among: Sequence[Array]) -> None:
    """Raise UserError if one of the values is not among the arrays."""
    if not isinstance(values, Sequence | Array):
        raise UserError(f"flow.call: writes is a list of arrays, not {values!r}")
    for value in values:
        if not any(value is each for each in among):
            raise UserError(f"flow.call: writes has {value!r}, which is not an array among the arguments")
