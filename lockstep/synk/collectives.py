"""Collectives on shared variables: what the user calls, and the one that all ranks work on, all_reduce.

All ranks' values lie in blocks that this process has mapped, so most collectives are a command that moves
values to their places (Settle), reading and writing them here, and a command that makes what was written the
value (Adopt).
"""

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.exchange.fold import fold_all
from lockstep.synk import rows
from lockstep.synk.allreduce import Shape, check_equal, make_all_reduce
from lockstep.synk.data import condition
from lockstep.synk.results import FOLD_OPS, check_foldable, normalise_op
from lockstep.synk.session import distributed_team
from lockstep.synk.shareds import Adopt, Place, Settle, Shapes, Shared, make_room, release_left

if TYPE_CHECKING:
    from lockstep.synk.team import Team


def broadcast(shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Gives all ranks this process's value, or one that is given here.

    shared_vars: a variable or its name, or a list of them. values: an array or Data for each. nccl: accepted,
    unused. Raises TypeError for a value of another dtype or number of dimensions, ValueError for an unknown
    variable.
    """
    team, shareds = _begin("broadcast", shared_vars)
    arrays = [shared.get() for shared in shareds] if values is None else _arrays(shareds, shared_vars, values)
    _write(team, "broadcast", shareds, [[array] * team.size for array in arrays])


def scatter(shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Divides values among the ranks' variables by rows, as a function's inputs are divided.

    batch: which rows, as in a call of a function.
    """
    team, shareds = _begin("scatter", shared_vars)
    parts = []
    for shared, array in zip(shareds, _arrays(shareds, shared_vars, values), strict=True):
        chosen = _choose(batch, array, f"scatter {shared.name!r}: batch")
        bounds = [rows.share(rows.count(chosen), rank, team.size) for rank in range(team.size)]
        parts.append([rows.excerpt(array, rows.part(chosen, *bound)) for bound in bounds])
    _write(team, "scatter", shareds, parts)


def gather(shared_vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
    """All ranks' values, in rank order.

    nd_up: 1 for one more dimension, the ranks' (a list where shapes differ); 0 to join them end to end.
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


def all_gather(shared_vars: Any, nccl: bool = True) -> None:
    """Gives all ranks all values, joined end to end in rank order."""
    team, shareds = _begin("all_gather", shared_vars)
    found = _read(team, "all_gather", shareds)
    joined = [_join(shared, parts, "all_gather") for shared, parts in zip(shareds, found, strict=True)]
    _write(team, "all_gather", shareds, [[array] * team.size for array in joined])


def reduce(shared_vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Folds all ranks' values into this process's variable, or, with in_place=False, into what is returned.

    op: avg, sum, max, min or prod. Raises ValueError where shapes differ or for an unknown op; TypeError for
    the avg of integers.
    """
    team, shareds = _begin("reduce", shared_vars)
    op = normalise_op(op, "reduce")
    results = []
    for shared, parts in zip(shareds, _read(team, "reduce", shareds), strict=True):
        check_foldable(op, parts[0].dtype, f"reduce: {shared.name!r}")
        check_equal(shared, [part.shape for part in parts], f"reduce {op}")
        result = np.empty(parts[0].shape, parts[0].dtype)
        fold_all([part.reshape(-1) for part in parts], [result.reshape(-1)], FOLD_OPS[op])
        results.append(result)
    if not in_place:
        return _like(shared_vars, results)
    for shared, result in zip(shareds, results, strict=True):
        shared.assign(result)
    return None


def all_reduce(shared_vars: Any, op: str = "avg", by_rows: bool = False, nccl: bool = True) -> None:
    """Folds all ranks' values; every rank's variable gets the result, the same bits in all of them.

    by_rows: with avg, ranks count by the rows that they had in the call that last updated the variable, so
    that the mean of ranks' means is the mean over all rows.
    """
    team, shareds = _begin("all_reduce", shared_vars)
    left = [shared.place for shared in shareds]
    team.ask("all_reduce", make_all_reduce(shareds, op, by_rows))
    release_left(team, shareds, left)


def set_value(rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Sets one rank's variables. batch: which rows of the values."""
    team, shareds = _begin("set_value", shared_vars)
    rank = _check_rank(team, "set_value", rank)
    parts = []
    for shared, array in zip(shareds, _arrays(shareds, shared_vars, values), strict=True):
        chosen = slice(None) if batch is None else _choose(batch, array, f"set_value {shared.name!r}: batch")
        parts.append([array[chosen] if batch is not None else array] * team.size)
    _write(team, "set_value", shareds, parts, rank)


def get_value(rank: int, shared_vars: Any) -> Any:
    """A copy of one rank's value."""
    team, shareds = _begin("get_value", shared_vars)
    found = _read(team, "get_value", shareds, _check_rank(team, "get_value", rank))
    return _like(shared_vars, [parts[0].copy() for parts in found])


def get_shapes(shared_vars: Any) -> Any:
    """The shapes of a variable's values, by rank."""
    team, shareds = _begin("get_shapes", shared_vars)
    by_rank = team.ask("get_shapes", Shapes(tuple(shared.number for shared in shareds)))[0]
    return _like(shared_vars, [list(shapes) for shapes in zip(*by_rank, strict=True)])


def get_lengths(shared_vars: Any) -> Any:
    """The numbers of rows of a variable's values, by rank. Raises ValueError for a scalar."""
    _, shareds = _begin("get_lengths", shared_vars)
    for shared in shareds:
        if len(shared.shape) == 0:
            raise ValueError(f"get_lengths: {shared.name!r} is a scalar")
    found = get_shapes(list(_listed(shared_vars)))
    return _like(shared_vars, [[shape[0] for shape in shapes] for shapes in found])


def _begin(what: str, shared_vars: Any) -> "tuple[Team, list[Shared]]":
    team = distributed_team(what)
    return team, team.known.find(shared_vars, what)


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]


def _like(given: Any, results: list[Any]) -> Any:
    """A list for a list, one for one."""
    return results if isinstance(given, list | tuple) else results[0]


def _describe_count(values: Any) -> str:
    is_list = isinstance(values, list | tuple)
    return f"{len(values)}" if is_list else type(values).__name__


def _arrays(shareds: list[Shared], shared_vars: Any, values: Any) -> list[np.ndarray]:
    """A value for each variable, as arrays of its dtype."""
    several = isinstance(shared_vars, list | tuple)
    listed = values if several else [values]
    if not isinstance(listed, list | tuple) or len(listed) != len(shareds):
        raise TypeError(
            f"{', '.join(shared.name for shared in shareds)}: {len(shareds)} variables need a list of as "
            f"many values, not {_describe_count(values)}"
        )
    found = []
    for shared, value in zip(shareds, listed, strict=True):
        if np.ndim(value) != len(shared.shape):
            raise TypeError(
                f"{shared.name!r} has {len(shared.shape)} dimensions, the value has {np.ndim(value)}"
            )
        found.append(condition(value, shared.dtype, repr(shared.name)))
    return found


def _choose(batch: Any, array: np.ndarray, what: str) -> rows.Choice:
    if array.ndim == 0:
        raise TypeError(f"{what}: a scalar has no rows")
    return rows.choose(batch, len(array), what)


def _check_rank(team: "Team", what: str, rank: Any) -> int:
    try:
        number = operator.index(rank)
    except TypeError:
        raise TypeError(f"{what}: rank {rank!r} is no whole number") from None
    if not 0 <= number < team.size:
        raise ValueError(f"{what}: there is no rank {number}: they are 0 to {team.size - 1}")
    return number


def _join(shared: Shared, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
    if parts[0].ndim == 0 or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        found = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"{what}: values of {shared.name!r} can't be joined end to end: {found}")
    return np.concatenate(parts)


def _read(team: "Team", what: str, shareds: list[Shared], only: int | None = None) -> list[list[np.ndarray]]:
    """All ranks' values by variable, or those of one; not copies."""
    numbers = tuple(shared.number for shared in shareds)
    places: tuple[Place, ...] | None = None
    left = [shared.place for shared in shareds]
    ranks = range(team.size) if only is None else [only]
    while True:
        by_rank = team.ask(what, Settle(numbers, places, only))[0]
        shapes = [[by_rank[rank][i] for rank in ranks] for i in range(len(shareds))]
        places = make_room(
            team, shareds, [max(map(_bytes_of(s), found)) for s, found in zip(shareds, shapes, strict=True)]
        )
        if all(place is shared.place for place, shared in zip(places, shareds, strict=True)):
            break
    release_left(team, shareds, left)
    return [
        [shared.view(team.here, rank, shape) for rank, shape in zip(ranks, found, strict=True)]
        for shared, found in zip(shareds, shapes, strict=True)
    ]


def _bytes_of(shared: Shared) -> Callable[[Shape], int]:
    itemsize = shared.dtype.itemsize
    return lambda shape: int(np.prod(shape, dtype=np.int64)) * itemsize


def _write(
    team: "Team", what: str, shareds: list[Shared], parts: list[list[np.ndarray]], only: int | None = None
) -> None:
    """Writes values to ranks' places and has them adopted. parts: by variable, by rank. only: this rank."""
    team.check()
    left = [shared.place for shared in shareds]
    places = make_room(team, shareds, [max(part.nbytes for part in by_rank) for by_rank in parts])
    for shared, place, by_rank in zip(shareds, places, parts, strict=True):
        for rank, part in enumerate(by_rank):
            if only is None or rank == only:
                view = team.here.blocks.array(place.span(rank, shared.dtype, part.shape))
                if view.ctypes.data != part.ctypes.data:
                    view[...] = part
    numbers = tuple(shared.number for shared in shareds)
    shapes = tuple(tuple(part.shape for part in by_rank) for by_rank in parts)
    team.ask(what, Adopt(numbers, places, shapes, only))
    release_left(team, shareds, left)
