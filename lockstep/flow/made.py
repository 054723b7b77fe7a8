"""Checks of what a loss, or an evaluated function, makes or writes in its model."""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.flow.arrays import Array, array_leaves
from lockstep.flow.replicas import ModelReplica


def check_made(replica: ModelReplica, written: Container[int], what: str) -> None:
    """Raise UserError if the function has made a parameter, or an array that it also writes.

    Nothing merges these, and what the first call of the function wrote into them was not restored. Tables
    that it makes and only reads are harmless.
    """
    own = replica.variables().values()
    known, memories = {id(array) for array in own}, {id(array.memory) for array in own}
    for name, parameter in replica.model.named_parameters():
        if id(parameter) not in known:
            raise UserError(
                f"the {what} made the parameter {name}, which no optimizer updates: make it in the model's "
                "__init__, or call your model once before you make the executor"
            )
    for name, array in _made_arrays(replica.model).items():
        if id(array.memory) in written and id(array.memory) not in memories:
            raise UserError(
                f"the {what} made the array {name} and writes it, so what its first call wrote would stay: "
                "make a buffer in the model's __init__, or call your model once before you make the executor"
            )


def check_undone(replica: ModelReplica, program: Any, what: str, key: Any) -> None:
    """Raise UserError if only calls before the capture of this program have changed some values.

    Args:
        key: Of the function in `first_writes`.
    """
    own, written = replica.variables(), program.written()
    for name in replica.first_writes.pop(key, set()):
        if id(own[name].memory) not in written and not program.moves(own[name]):
            replica.undone.add(name)
    if replica.undone:
        raise UserError(
            f"the {what} writes {', '.join(sorted(replica.undone))} in its first call only, which a capture "
            "undoes: call your model once before you make the executor, or write it in the model's "
            "__init__"
        )


def check_tables(replicas: Sequence[ModelReplica]) -> None:
    """Raise UserError if a function has made an array with other values on each device: nothing merges it."""
    made = [_made_arrays(replica.model) for replica in replicas]
    known = {id(array) for array in replicas[0].variables().values()}
    for name in [name for name, array in made[0].items() if id(array) not in known]:
        arrays = [own[name] for own in made if name in own]
        values = [array.tensor().to_dense() for array in arrays if array.memory.program is None]
        if any(each.shape == values[0].shape and not _are_equal(each, values[0]) for each in values[1:]):
            raise UserError(
                f"a function made the array {name} with other values on each device, such as those of its "
                "samples: call your model once before you make the executor"
            )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the elements of two tensors of one shape are equal, or not a number."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _made_arrays(model: nn.Module) -> dict[str, Array]:
    """Return a model's buffers, and the arrays in other attributes of its modules, by name."""
    return {
        f"{path}.{key}".removeprefix(".") + f"[{n}]" * (n > 0): array
        for path, module in model.named_modules()
        for key, value in [*vars(module).items(), *module._buffers.items()]
        if key not in ("_parameters", "_buffers")
        for n, array in enumerate(array_leaves(value))
    }
