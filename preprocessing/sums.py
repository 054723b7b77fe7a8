"""Sums over training images, for the mean image and the mean and standard deviation of each color channel.

Sums of integers are exact and independent of their order, so neither the number of workers nor an
interruption changes a bit of the mean. Only its division is in float64.
"""

import numpy as np

_CHUNK = 257  # 257 times 255 fits into uint16


class PixelSums:
    """Sums of pixels: total is uint64 (row, column, 3), squares uint64 (3,), count the number of images."""

    def __init__(self, size: int) -> None:
        self.total = np.zeros((size, size, 3), np.uint64)
        self.squares = np.zeros(3, np.uint64)
        self.count = 0

    def add(self, images: np.ndarray) -> None:
        """Add images, uint8 (batch, row, column, 3)."""
        squares = np.zeros(self.total.shape, np.uint64)
        for first in range(0, len(images), _CHUNK):
            chunk = images[first : first + _CHUNK]
            self.total += chunk.sum(0, dtype=np.uint16)
            squares += _sum_of_squares(chunk)
        self.squares += squares.sum((0, 1))
        self.count += len(images)

    def merge(self, other: "PixelSums") -> None:
        """Add the sums of other images of the same shape."""
        self.total += other.total
        self.squares += other.squares
        self.count += other.count

    def without(self, other: "PixelSums") -> "PixelSums":
        """Return the sums without those of some of the images."""
        rest = PixelSums(len(self.total))
        rest.total, rest.squares = self.total - other.total, self.squares - other.squares
        rest.count = self.count - other.count
        return rest

    def mean(self) -> np.ndarray:
        """Return the mean image: float64 (row, column, 3)."""
        mean: np.ndarray = self.total / self.count
        return mean

    def channel_mean(self) -> np.ndarray:
        """Return the mean of each channel: float64 (3,)."""
        mean: np.ndarray = self.total.sum((0, 1)) / self._pixels
        return mean

    def channel_std(self) -> np.ndarray:
        """Return the standard deviation of each channel over all pixels: float64 (3,)."""
        variance: np.ndarray = self.squares / self._pixels - self.channel_mean() ** 2
        std: np.ndarray = np.sqrt(np.maximum(variance, 0))
        return std

    @property
    def _pixels(self) -> int:
        return self.count * self.total.shape[0] * self.total.shape[1]


def _sum_of_squares(chunk: np.ndarray) -> np.ndarray:
    total = np.zeros(chunk.shape[1:], np.uint32)
    square = np.empty(chunk.shape[1:], np.uint16)
    for image in chunk:
        np.multiply(image, image, out=square, dtype=np.uint16)
        total += square
    return total
