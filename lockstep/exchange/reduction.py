"""Reductions of several arrays into one, chunk by chunk through a core's cache, in array order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.exchange import Op
from lockstep.exchange.tree import PartialSums, Shape

CHUNK = 1 << 16  # elements; a chunk of each array stays in the cache between being read and being written

# The function that combines two arrays. It has the same name in NumPy and in torch.
_FUNCTIONS: dict[Op, str] = {
    "mean": "add",
    "sum": "add",
    "max": "maximum",
    "min": "minimum",
    "prod": "multiply",
    "pairwise": "add",
}


@np.errstate(all="ignore")  # a reduction of torch does not warn either: an infinite gradient is usual
def combine_into(total: Any, value: Any, op: Op, library: Any = np) -> None:
    """Replace `total` by its combination with `value`. A mean is a sum here: the caller divides it.

    Args:
        total, value: Arrays or tensors of one shape and dtype.
        op: The reduction.
        library: numpy, or torch if they are tensors.
    """
    getattr(library, _FUNCTIONS[op])(total, value, out=total)


def _along_tree(arrays: Sequence[np.ndarray], shape: Shape, total: np.ndarray | None) -> np.ndarray:
    """Return the sum of the arrays along a tree, in `total` if it is given. An array is not written."""
    if isinstance(shape, int):
        return arrays[shape]
    left, right = (_along_tree(arrays, side, None) for side in shape)
    if total is None:
        sides = zip((left, right), shape, strict=True)
        total = next((array for array, side in sides if not isinstance(side, int)), None)
    added: np.ndarray = np.add(left, right, out=total)
    return added


def _in_turn(arrays: Sequence[np.ndarray], op: Op, total: np.ndarray) -> None:
    getattr(np, _FUNCTIONS[op])(arrays[0], arrays[1], out=total)
    for array in arrays[2:]:
        combine_into(total, array, op)


def chunks(arrays: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """Return the arrays, all (n,), cut into chunks: a tuple of views, one per array, for each chunk."""
    starts = range(0, len(arrays[0]), CHUNK)
    return [tuple(array[start : start + CHUNK] for array in arrays) for start in starts]


def reduce_chunk(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: Op, shape: Shape | None = None
) -> None:
    """Write the reduction of all sources, from the first to the last, into every target.

    Args:
        sources: Arrays (n,) of one dtype; n at most CHUNK, for speed.
        targets: Arrays like these. A target may be one of the sources: the same array object.
        op: 'mean' is the sum, divided by the number of sources.
        shape: For 'pairwise', the tree of sums; None for the tree over as many leaves as sources.
    """
    if not targets:
        return
    total = targets[0]
    if len(sources) == 1:
        if total is not sources[0]:
            np.copyto(total, sources[0])
    elif op == "pairwise":
        _along_tree(sources, PartialSums.of_ranks(len(sources)).shape if shape is None else shape, total)
    else:
        if any(total is source for source in sources[2:]):  # else it would be written before it is read
            total = np.empty_like(total)
        if op == "mean" and total.dtype == np.float16:  # a sum may exceed its range
            wide = np.empty(total.shape, np.float32)
            _in_turn([source.astype(np.float32) for source in sources], op, wide)
            np.divide(wide, len(sources), out=total, casting="same_kind")
        else:
            _in_turn(sources, op, total)
            if op == "mean":
                np.divide(total, len(sources), out=total)
    for target in targets:
        if target is not total:
            np.copyto(target, total)


@np.errstate(all="ignore")
def reduce_arrays(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    op: Op,
    weights: Sequence[float] | None = None,
) -> None:
    """Do as `reduce_chunk` for arrays (n,) of any length, in chunks.

    Args:
        sources: Arrays of one dtype.
        targets: Arrays like these.
        op: The reduction.
        weights: For 'mean', the sources' shares, which add up to 1; None for equal shares.
    """
    arrays = list({id(array): array for array in (*sources, *targets)}.values())
    for pieces in chunks(arrays):
        by_array = {id(array): piece for array, piece in zip(arrays, pieces, strict=True)}
        cut_sources = [by_array[id(array)] for array in sources]
        cut_targets = [by_array[id(array)] for array in targets]
        if weights is None:
            reduce_chunk(cut_sources, cut_targets, op)
        else:
            _reduce_weighted(cut_sources, cut_targets, weights)


def _reduce_weighted(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], weights: Sequence[float]
) -> None:
    dtype = np.promote_types(sources[0].dtype, np.float32)  # float16 is summed in float32
    total, scaled = np.multiply(sources[0], weights[0], dtype=dtype), np.empty(sources[0].shape, dtype)
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        np.multiply(source, weight, out=scaled)
        np.add(total, scaled, out=total)
    for target in targets:
        np.copyto(target, total, casting="same_kind")
