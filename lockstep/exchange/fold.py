"""Folding arrays of several ranks into one, in rank order: on the host, by NumPy, in chunks that stay in a
core's cache.

Each element is computed from the first part to the last and written to every output, so whoever folds it, and
into however many shards it is cut, its bits are the same.
"""

from collections.abc import Sequence

import numpy as np

CHUNK_BYTES = 1 << 17  # of each part; all parts' chunks and the sum are to fit into the second-level cache

OPS = {"avg": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def fold(
    op: str,
    parts: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    weights: Sequence[float] | None = None,
) -> None:
    """Writes the fold of all `parts` into every one of `outputs`.

    op: avg, sum, max, min or prod. parts and outputs: arrays (n,) of one dtype; an output may be one of the
    parts, but may not overlap it otherwise. weights: for avg, the parts' shares, which add up to 1; None
    where they are equal.
    """
    n_elements, n_chunk = len(parts[0]), max(1, CHUNK_BYTES // parts[0].itemsize)
    total, scaled = np.empty((2, min(n_chunk, n_elements)), parts[0].dtype)
    for first in range(0, n_elements, n_chunk):
        chunks = [part[first : first + n_chunk] for part in parts]
        n = len(chunks[0])
        if op == "avg" and weights is not None:
            _fold_weighted(chunks, weights, total[:n], scaled[:n])
        else:
            _fold_equal(op, chunks, total[:n])
        for output in outputs:
            output[first : first + n] = total[:n]


def _fold_equal(op: str, chunks: list[np.ndarray], total: np.ndarray) -> None:
    if len(chunks) == 1:
        total[:] = chunks[0]
        return
    OPS[op](chunks[0], chunks[1], out=total)
    for chunk in chunks[2:]:
        OPS[op](total, chunk, out=total)
    if op == "avg":
        np.divide(total, len(chunks), out=total)


def _fold_weighted(
    chunks: list[np.ndarray], weights: Sequence[float], total: np.ndarray, scaled: np.ndarray
) -> None:
    np.multiply(chunks[0], weights[0], out=total)
    for chunk, weight in zip(chunks[1:], weights[1:], strict=True):
        np.multiply(chunk, weight, out=scaled)
        np.add(total, scaled, out=total)


def fractions(rows: Sequence[int]) -> list[float] | None:
    """The shares of parts that stand for so many rows each; None where they are equal."""
    if all(number == rows[0] for number in rows):
        return None
    return [number / sum(rows) for number in rows]
