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
        combine = _COMBINE[op]
        combine(sources[0], sources[1], out=total)
        for source in sources[2:]:
            combine(total, source, out=total)
        if op == "mean":
            np.divide(total, len(sources), out=total)
    for target in targets:
        if target is not total:
            np.copyto(target, total)
