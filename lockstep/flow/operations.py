"""Operations that are no single one of torch's: recorded like those, run anywhere, with their own hazards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.flow import placement, private
from lockstep.flow.arrays import Array, Storage
from lockstep.flow.devices import Device
from lockstep.flow.instructions import Instruction
from lockstep.flow.recipes import Recipe, Slot
from lockstep.flow.recording import submit


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
    """Has function(*values of the inputs) run on a device, where all inputs must be.

    written: those inputs that it changes. made: new arrays, for the tuple that it returns.
    """
    step = Instruction(name, function, device, lane)
    step.template, step.views = [Slot(n) for n in range(len(inputs))], [a.view_of_memory() for a in inputs]
    step.line, step.phase = placement.user_line(), phase
    if made:
        structure = private.tree_flatten(tuple(range(len(made))))[1]
        promised = [array.memory.cell.layout for array in made]
        if all(layout is not None for layout in promised):
            step.recipe = Recipe(list(promised), [None] * len(made), structure)
        else:
            assert len(made) == 1, "a sparse array is made alone"
    return submit(step, list(inputs), list(written), list(made))


def new(device: Device, size: Sequence[int], dtype: torch.dtype, inputs: Sequence[Array]) -> Array:
    """A contiguous array without a value, for an operation on these inputs to make."""
    shape = torch.Size(size)
    with private.without_modes():
        stride = torch.empty(shape, device="meta").stride()
    storage = Storage(device, (shape, stride, dtype), program=placement.program_of(inputs))
    return Array(storage, shape, stride, 0, dtype)


def new_sparse(device: Device, like: Array) -> Array:
    """A sparse array without a value."""
    storage = Storage(device, None, program=placement.program_of([like]))
    return Array(storage, like.size(), None, 0, like.dtype)


def copied(array: Array) -> Array:
    """A copy on the current device."""
    made: Any = array.clone()
    return made  # type: ignore[no-any-return]


def reshaped(array: Array, like: Array) -> Array:
    """A view with another array's shape."""
    made: Any = array.view(like.shape)
    return made  # type: ignore[no-any-return]
