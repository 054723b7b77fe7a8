"""Filters that scale images bilinearly with antialiasing, with the bits of torch's uint8 images on CPUs.

A new pixel is a weighted mean of old ones. The weights are a triangle as wide as two new pixels, or two old
ones if the image is enlarged. They are whole numbers: each sum is shifted to the right.
"""

import math

import numpy as np

_MOST_SHIFT = 22
_LIMIT = 1 << 15  # of int16
HEAD = 2  # numbers before the weights


def scaling_filters(n_most: int, n_new: int) -> np.ndarray:
    """Return the filters that scale 1, 2, ... n_most pixels in a row to n_new.

    Returns:
        int16 (n_most, n_new, HEAD + weights): for each number of old pixels and each new pixel the first old
        pixel, the shift, and the weights, behind which there are zeros.
    """
    n_weights = 2 * math.ceil(max(n_most / n_new, 1)) + 1
    filters = np.zeros((n_most, n_new, HEAD + n_weights), np.int16)
    for n_old in range(1, n_most + 1):
        first, shift, weights = _filter(n_old, n_new)
        filters[n_old - 1, :, 0], filters[n_old - 1, :, 1] = first, shift
        filters[n_old - 1, :, HEAD : HEAD + weights.shape[1]] = weights
    return filters


def _filter(n_old: int, n_new: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Return the first old pixel of each new one (new,), the shift, and the weights (new, weights)."""
    scale = n_old / n_new
    support = max(scale, 1.0)
    centers = scale * (np.arange(n_new) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centers + support + 0.5).astype(np.int64), n_old)
    old = first[:, None] + np.arange(2 * math.ceil(support) + 1)
    distances = np.abs(old - centers[:, None] + 0.5) * (1 / support)
    triangles = np.where(old < last[:, None], np.maximum(1 - distances, 0), 0)
    sums = np.zeros(n_new)
    for column in triangles.T:  # in torch's order
        sums += column
    weights = triangles / sums[:, None]
    shift = next(n for n in range(_MOST_SHIFT + 1) if n == _MOST_SHIFT or _scaled(weights.max(), n) >= _LIMIT)
    return first, shift, (0.5 + weights * (1 << shift)).astype(np.int64)


def _scaled(weight: float, shift: int) -> int:
    return int(0.5 + weight * (1 << (shift + 1)))
