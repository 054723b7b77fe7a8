"""Crop, mirror, mean subtraction and shift of colour, from uint8 images to what a network takes."""

from typing import Any

import numpy as np

# Crops of so many rows and more are made by torch, which mirrors them several times as fast. Smaller ones are
# made before torch has been called, and a loader of those need not import it.
TORCH_FROM = 72


class Augmenter:
    """Cuts a square out of each image, mirrors it where told, and subtracts the mean image's same part.

    The mean is taken at the image's own place, before mirroring, as theano_alexnet did: the result is that of
    subtracting from the whole image, cropping, then mirroring. Measured alternatives are in
    docs/decisions.md.

    mean: float32 (row, column, channel), of the images' size.
    """

    def __init__(self, mean: np.ndarray, crop_size: int) -> None:
        assert crop_size <= min(mean.shape[:2])
        self._means = mean, np.ascontiguousarray(mean[:, ::-1])
        self._size = crop_size

    def apply(
        self, images: np.ndarray, crops: np.ndarray, out: np.ndarray, shifts: np.ndarray | None = None
    ) -> None:
        """images: uint8 (batch, row, column, channel); crops: int32 (batch, 3), the row and column of the
        corner in each image, and whether to mirror it; out: float32 (batch, size, size, channel), written
        completely; shifts: float32 (batch, channel), added to each image's pixels at last."""
        if shifts is None:
            shifts = np.empty((len(images), 0), np.float32)
        arrays = images, out, np.tile(shifts, self._size)
        if self._size < TORCH_FROM:
            self._apply(arrays, crops, self._means, _fill)
        else:
            import torch

            means = tuple(map(torch.from_numpy, self._means))
            self._apply(map(torch.from_numpy, arrays), crops, means, _fill_by_torch)

    def _apply(self, arrays: Any, crops: np.ndarray, means: tuple[Any, ...], fill: Any) -> None:
        """arrays: images, out, and what is added to every row of each image, or nothing."""
        size = self._size
        for image, result, line, crop in zip(*arrays, crops.tolist(), strict=True):
            row, column, mirrored = crop
            down = slice(row, row + size)
            first = image.shape[1] - column - size if mirrored else column
            mean = means[mirrored][down, first : first + size]
            fill(result, image[down, column : column + size], mirrored, mean)
            if len(line):
                rows = result.reshape(size, -1)  # a view
                rows += line


def _fill(result: np.ndarray, crop: np.ndarray, mirrored: int, mean: np.ndarray) -> None:
    np.copyto(result, crop[:, ::-1] if mirrored else crop)
    np.subtract(result, mean, out=result)


def _fill_by_torch(result: Any, crop: Any, mirrored: int, mean: Any) -> None:
    if mirrored:
        # channels first for flip: it has a fast path for images that lie channels last
        crop = crop.permute(2, 0, 1).flip(2).permute(1, 2, 0)
    result.copy_(crop).sub_(mean)
