"""Folds of several arrays into one, chunk by chunk through a core's cache, in the order of the arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.exchange import Op

CHUNK = 1 << 16  # elements; a chunk of each array stays in the cache between being read and being written

_COMBINE: dict[Op, Callable[..., Any]] = {
    "mean": np.add,
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def _pairwise(arrays: Sequence[np.ndarray]) -> np.ndarray:
    while len(arrays) > 1:
        pairs = [arrays[place : place + 2] for place in range(0, len(arrays), 2)]
        arrays = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return arrays[0]


def _in_turn(arrays: Sequence[np.ndarray], combine: Callable[..., Any], total: np.ndarray) -> None:
    combine(arrays[0], arrays[1], out=total)
    for array in arrays[2:]:
        combine(total, array, out=total)


def chunks(arrays: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """The arrays, all (n,), cut into chunks: views, of all arrays side by side."""
    starts = range(0, len(arrays[0]), CHUNK)
    return [tuple(array[start : start + CHUNK] for array in arrays) for start in starts]


def fold(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: Op) -> None:
    """Writes the fold of all sources, from the first to the last, into every target.

    All are (n,) of one dtype, n at most CHUNK for speed. A target may be one of the sources: the same array
    object. 'mean' is the sum, divided by the number of sources.
    """
    if not targets:
        return
    total = targets[0]
    if len(sources) == 1:
        if total is not sources[0]:
            np.copyto(total, sources[0])
    else:
        if any(total is source for source in sources[2:]):  # it is read only after it would be written
            total = np.empty_like(total)
        if op == "pairwise":
            np.copyto(total, _pairwise(sources))
        else:
            _in_turn(sources, _COMBINE[op], total)
        if op == "mean":
            np.divide(total, len(sources), out=total)
    for target in targets:
        if target is not total:
            np.copyto(target, total)


def fold_all(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    op: Op,
    weights: Sequence[float] | None = None,
) -> None:
    """The same for arrays (n,) of any length, in chunks.

    weights: for 'mean', the sources' shares, which add up to 1; None where they are equal.
    """
    arrays = list({id(array): array for array in (*sources, *targets)}.values())
    for pieces in chunks(arrays):
        by_array = {id(array): piece for array, piece in zip(arrays, pieces, strict=True)}
        cut_sources = [by_array[id(array)] for array in sources]
        cut_targets = [by_array[id(array)] for array in targets]
        if weights is None:
            fold(cut_sources, cut_targets, op)
        else:
            _fold_weighted(cut_sources, cut_targets, weights)


def _fold_weighted(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], weights: Sequence[float]
) -> None:
    total, scaled = np.multiply(sources[0], weights[0]), np.empty_like(sources[0])
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        np.multiply(source, weight, out=scaled)
        np.add(total, scaled, out=total)
    for target in targets:
        np.copyto(target, total)
