"""Collectives on shared variables.

This process has mapped the blocks of all ranks. Most collectives therefore move the values to their slots
(MoveToSlots), read and write them in this process, and then make the written arrays the values (UseSlots).
Only all_reduce computes on all ranks.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from lockstep.exchange.reduction import reduce_arrays
from lockstep.synk import rows
from lockstep.synk.data import condition
from lockstep.synk.results import REDUCE_OPS, check_reducible, normalise_op
from lockstep.synk.session import distributed_team
from lockstep.synk.shareds import BlockSlot, Shared
from lockstep.synk.slots import (
    MoveToSlots,
    ReadShapes,
    Shape,
    UseSlots,
    check_equal,
    find_slots,
    make_all_reduce,
    release_unused,
)
from lockstep.synk.team import Team

P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(collective: Callable[P, R]) -> Callable[P, R]:
    """Return the collective as a public call, during which other threads wait."""

    @functools.wraps(collective)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        with distributed_team(collective.__name__).exclusive_call(f"{collective.__name__}()"):
            return collective(*arguments, **options)

    return call


@_exclusive
def broadcast(shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Set the variables of all ranks to this process's values, or to `values`.

    Args:
        shared_vars: A variable or its name, or a list of them.
        values: An array or Data for each variable.
        nccl: Accepted for Synkhronos and ignored.

    Raises:
        TypeError: A value has another number of dimensions, or casting it would lose information (float64 to
            float32).
        ValueError: A variable is unknown.
    """
    team, shareds = _begin("broadcast", shared_vars)
    arrays = [shared.get() for shared in shareds] if values is None else _arrays(shareds, shared_vars, values)
    missing = None if values is not None else tuple(shared.parts_without_value() for shared in shareds)
    _write(team, "broadcast", shareds, [[array] * team.size for array in arrays], missing=missing)


@_exclusive
def scatter(shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Divide values by rows among the ranks' variables, as a call divides its inputs.

    Args:
        shared_vars: A variable or its name, or a list of them.
        values: An array or Data for each variable.
        batch: Rows of the values to use, as in a call of a function.
    """
    team, shareds = _begin("scatter", shared_vars)
    parts = []
    for shared, array in zip(shareds, _arrays(shareds, shared_vars, values), strict=True):
        chosen = _choose(batch, array, f"scatter {shared.name!r}: batch")
        bounds = [rows.divide(rows.count(chosen), rank, team.size) for rank in range(team.size)]
        parts.append([rows.excerpt(array, rows.part(chosen, *bound)) for bound in bounds])
    _write(team, "scatter", shareds, parts)


@_exclusive
def gather(shared_vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
    """Return all ranks' values in rank order.

    Args:
        nd_up: 1 stacks the values along a new first dimension (a list if shapes differ); 0 concatenates them.
    """
    if nd_up not in (0, 1):
        raise ValueError(f"gather: nd_up={nd_up}: it is 0 or 1")
    team, shareds = _begin("gather", shared_vars)
    results: list[Any] = []
    for shared, parts in zip(shareds, _read(team, "gather", shareds), strict=True):
        if nd_up == 0:
            results.append(_join(shared, parts, "gather"))
        elif all(part.shape == parts[0].shape for part in parts):
            results.append(np.stack(parts))
        else:
            results.append([part.copy() for part in parts])
    return _like(shared_vars, results)


@_exclusive
def all_gather(shared_vars: Any, nccl: bool = True) -> None:
    """Set every rank's variable to all ranks' values, concatenated in rank order."""
    team, shareds = _begin("all_gather", shared_vars)
    by_variable = _read(team, "all_gather", shareds)
    joined = [_join(shared, parts, "all_gather") for shared, parts in zip(shareds, by_variable, strict=True)]
    _write(team, "all_gather", shareds, [[array] * team.size for array in joined])


@_exclusive
def reduce(shared_vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Reduce all ranks' values into this process's variable, or return the result if not `in_place`.

    Args:
        op: avg, sum, max, min or prod.

    Raises:
        ValueError: Shapes differ, or the op is unknown.
        TypeError: The op is avg and the values are integers.
    """
    team, shareds = _begin("reduce", shared_vars)
    op = normalise_op(op, "reduce")
    results = []
    for shared, parts in zip(shareds, _read(team, "reduce", shareds), strict=True):
        check_reducible(op, parts[0].dtype, f"reduce: {shared.name!r}")
        check_equal(shared, [part.shape for part in parts], f"reduce {op}")
        result = np.empty(parts[0].shape, parts[0].dtype)
        reduce_arrays([part.reshape(-1) for part in parts], [result.reshape(-1)], REDUCE_OPS[op])
        results.append(result)
    if not in_place:
        return _like(shared_vars, results)
    for shared, result in zip(shareds, results, strict=True):
        shared.assign(result)
    return None


@_exclusive
def all_reduce(shared_vars: Any, op: str = "avg", by_rows: bool = False, nccl: bool = True) -> None:
    """Replace every rank's value by the reduction over all ranks, bitwise the same on all.

    Args:
        op: avg, sum, max, min or prod.
        by_rows: Weight the avg by each rank's number of rows in the call that last updated the variable, so
            that the mean of the ranks' means is the mean over all rows.
    """
    team, shareds = _begin("all_reduce", shared_vars)
    previous = [shared.slot for shared in shareds]
    try:
        team.ask("all_reduce", make_all_reduce(shareds, op, by_rows))
    finally:
        release_unused(team, shareds, previous)


@_exclusive
def set_value(rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Set the variables of one rank to the rows `batch` of the values."""
    team, shareds = _begin("set_value", shared_vars)
    rank = _check_rank(team, "set_value", rank)
    parts = []
    for shared, array in zip(shareds, _arrays(shareds, shared_vars, values), strict=True):
        chosen = slice(None) if batch is None else _choose(batch, array, f"set_value {shared.name!r}: batch")
        parts.append([array[chosen] if batch is not None else array] * team.size)
    _write(team, "set_value", shareds, parts, rank)


@_exclusive
def get_value(rank: int, shared_vars: Any) -> Any:
    """Return a copy of one rank's value."""
    team, shareds = _begin("get_value", shared_vars)
    by_variable = _read(team, "get_value", shareds, _check_rank(team, "get_value", rank))
    return _like(shared_vars, [parts[0].copy() for parts in by_variable])


@_exclusive
def get_shapes(shared_vars: Any) -> Any:
    """Return the shapes of a variable's values by rank."""
    team, shareds = _begin("get_shapes", shared_vars)
    return _like(shared_vars, _shapes_by_rank(team, "get_shapes", shareds))


@_exclusive
def get_lengths(shared_vars: Any) -> Any:
    """Return the numbers of rows of a variable's values by rank; raise ValueError for a scalar."""
    team, shareds = _begin("get_lengths", shared_vars)
    for shared in shareds:
        if len(shared.shape) == 0:
            raise ValueError(f"get_lengths: {shared.name!r} is a scalar")
    by_variable = _shapes_by_rank(team, "get_lengths", shareds)
    return _like(shared_vars, [[shape[0] for shape in shapes] for shapes in by_variable])


def _shapes_by_rank(team: Team, what: str, shareds: list[Shared]) -> list[list[Shape]]:
    """Return the shapes by variable, then by rank."""
    by_rank = team.ask(what, ReadShapes(tuple(shared.number for shared in shareds)))[0]
    return [list(shapes) for shapes in zip(*by_rank, strict=True)]


def _begin(what: str, shared_vars: Any) -> tuple[Team, list[Shared]]:
    team = distributed_team(what)
    return team, team.registry.find(shared_vars, what)


def _like(argument: Any, results: list[Any]) -> Any:
    """Return the results as a list if the argument was one, else the only result."""
    return results if isinstance(argument, list | tuple) else results[0]


def _arrays(shareds: list[Shared], shared_vars: Any, values: Any) -> list[np.ndarray]:
    """Return one array per variable, in the variable's dtype."""
    several = isinstance(shared_vars, list | tuple)
    listed = values if several else [values]
    given = len(listed) if isinstance(listed, list | tuple) else type(values).__name__
    if given != len(shareds):
        raise TypeError(
            f"{', '.join(shared.name for shared in shareds)}: {len(shareds)} variables need a list of as "
            f"many values, not {given}"
        )
    arrays = []
    for shared, value in zip(shareds, listed, strict=True):
        if np.ndim(value) != len(shared.shape):
            raise TypeError(
                f"{shared.name!r} has {len(shared.shape)} dimensions, the value has {np.ndim(value)}"
            )
        arrays.append(condition(value, shared.dtype, repr(shared.name)))
    return arrays


def _choose(batch: Any, array: np.ndarray, what: str) -> rows.Choice:
    if array.ndim == 0:
        raise TypeError(f"{what}: a scalar has no rows")
    return rows.choose(batch, len(array), what)


def _check_rank(team: Team, what: str, rank: Any) -> int:
    try:
        number = operator.index(rank)
    except TypeError:
        raise TypeError(f"{what}: rank {rank!r} is not a whole number") from None
    if not 0 <= number < team.size:
        raise ValueError(f"{what}: rank {number} does not exist: ranks are 0 to {team.size - 1}")
    return number


def _join(shared: Shared, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
    if parts[0].ndim == 0 or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"{what}: values of {shared.name!r} can't be joined end to end: {shapes}")
    return np.concatenate(parts)


def _read(team: Team, what: str, shareds: list[Shared], only: int | None = None) -> list[list[np.ndarray]]:
    """Return the values of all ranks, or of rank `only`, by variable. No copies."""
    numbers = tuple(shared.number for shared in shareds)
    slots: tuple[BlockSlot, ...] | None = None
    previous = [shared.slot for shared in shareds]
    ranks = range(team.size) if only is None else [only]
    while True:
        by_rank = team.ask(what, MoveToSlots(numbers, slots, only))[0]
        shapes = [[by_rank[rank][i] for rank in ranks] for i in range(len(shareds))]
        largest = [max(map(math.prod, value_shapes)) for value_shapes in shapes]
        sizes = [n * shared.dtype.itemsize for n, shared in zip(largest, shareds, strict=True)]
        slots = find_slots(team, shareds, sizes)
        if all(slot is shared.slot for slot, shared in zip(slots, shareds, strict=True)):
            break
    release_unused(team, shareds, previous)
    blocks = team.context.blocks
    return [
        [shared.view(blocks, rank, shape) for rank, shape in zip(ranks, value_shapes, strict=True)]
        for shared, value_shapes in zip(shareds, shapes, strict=True)
    ]


def _write(
    team: Team,
    what: str,
    shareds: list[Shared],
    parts: list[list[np.ndarray]],
    only: int | None = None,
    missing: tuple[frozenset[int], ...] | None = None,
) -> None:
    """Write values to the slots of all ranks, or of rank `only`.

    Args:
        parts: The values by variable, then by rank.
        missing: Indices of the parts of each variable without a value, or None if all have one.
    """
    for shared, by_rank in zip(shareds, parts, strict=True):
        for part in by_rank:
            shared.check_shape(part.shape)
    previous = [shared.slot for shared in shareds]
    slots = find_slots(team, shareds, [max(part.nbytes for part in by_rank) for by_rank in parts])
    blocks, writes = team.context.blocks, []
    for shared, slot, by_rank in zip(shareds, slots, parts, strict=True):
        for rank, part in enumerate(by_rank):
            view = blocks.array(slot.location(rank, shared.dtype, part.shape))
            is_own = view.ctypes.data == part.ctypes.data and view.strides == part.strides
            if not is_own and only in (None, rank):
                writes.append((view, part))
    for view, part in _independent(writes):
        view[...] = part
    numbers = tuple(shared.number for shared in shareds)
    shapes = tuple(tuple(part.shape for part in by_rank) for by_rank in parts)
    missing = missing or (frozenset(),) * len(shareds)
    try:
        team.ask(what, UseSlots(numbers, slots, shapes, missing, only))
    finally:
        release_unused(team, shareds, previous)


def _independent(writes: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return destinations and values, with copies of the values that lie in the memory of a destination."""
    views = [view for view, _ in writes]
    return [
        (view, part.copy() if any(np.may_share_memory(part, other) for other in views) else part)
        for view, part in writes
    ]
