"""Augmentation on the CPU: crop, mirror, mean subtraction and color shift, from uint8 to float32.

On GPUs kernels/augment.cu does the same.
"""

from typing import Any

import numpy as np

# torch crops and mirrors images of this many rows faster than NumPy, and smaller ones more slowly
# (docs/decisions/loading.md, L-3).
TORCH_FROM = 72


class Augmenter:
    """A transform that crops and mirrors images and subtracts the mean image.

    The result equals that of subtracting the mean from the whole image, then cropping, then mirroring, as in
    theano_alexnet.

    Args:
        mean: The mean image: float32 (row, column, channel), of the images' size.
        crop_size: Rows and columns of the crops.
    """

    def __init__(self, mean: np.ndarray, crop_size: tuple[int, int]) -> None:
        assert all(crop <= whole for crop, whole in zip(crop_size, mean.shape[:2], strict=True))
        self._means = mean, np.ascontiguousarray(mean[:, ::-1])
        self._size = crop_size

    def apply(
        self, images: np.ndarray, crops: np.ndarray, out: np.ndarray, shifts: np.ndarray | None = None
    ) -> None:
        """Crop, mirror and shift a batch of images.

        Args:
            images: uint8 (batch, row, column, channel).
            crops: int32 (batch, 3): the row and column of each crop's corner, and 1 to mirror it.
            out: float32 (batch, *crop_size, channel), overwritten with the result.
            shifts: float32 (batch, channel), added to all pixels of each image at the end.
        """
        if shifts is None:
            shifts = np.empty((len(images), 0), np.float32)
        arrays = images, out, np.tile(shifts, self._size[1])
        if self._size[0] < TORCH_FROM:
            self._apply(arrays, crops, self._means, _mirror_and_subtract)
        else:
            import torch

            means = tuple(map(torch.from_numpy, self._means))
            self._apply(map(torch.from_numpy, arrays), crops, means, _mirror_and_subtract_by_torch)

    def _apply(self, arrays: Any, crops: np.ndarray, means: tuple[Any, ...], fill: Any) -> None:
        """Apply `fill` to each image. arrays: images, out, and the shifts of one row of each image."""
        rows, columns = self._size
        for image, result, line, crop in zip(*arrays, crops.tolist(), strict=True):
            row, column, mirrored = crop
            down = slice(row, row + rows)
            first = image.shape[1] - column - columns if mirrored else column
            mean = means[mirrored][down, first : first + columns]
            fill(result, image[down, column : column + columns], mirrored, mean)
            if len(line):
                flat = result.reshape(rows, -1)  # a view
                flat += line


def _mirror_and_subtract(result: np.ndarray, crop: np.ndarray, mirrored: int, mean: np.ndarray) -> None:
    np.copyto(result, crop[:, ::-1] if mirrored else crop)
    np.subtract(result, mean, out=result)


def _mirror_and_subtract_by_torch(result: Any, crop: Any, mirrored: int, mean: Any) -> None:
    result.copy_(mirrored_by_torch(crop) if mirrored else crop).sub_(mean)


def mirrored_by_torch(image: Any) -> Any:
    """Return a tensor (row, column, channel) with its columns reversed."""
    # flip has a fast path for images in channels-last memory, which it expects as (channel, row, column)
    return image.permute(2, 0, 1).flip(2).permute(1, 2, 0)
