"""Crop, mirror and mean subtraction, from uint8 images to what a network takes."""

import torch


class Augmenter:
    """Cuts a square out of each image, mirrors it where told, and subtracts the mean image's same part.

    The mean is taken at the image's own place, before mirroring, as theano_alexnet did: the result is that of
    subtracting from the whole image, cropping, then mirroring. Measured alternatives are in
    docs/decisions.md.

    mean: float32 (row, column, channel), of the images' size.
    """

    def __init__(self, mean: torch.Tensor, crop_size: int) -> None:
        assert crop_size <= min(mean.shape[:2])
        self._mean = mean
        self._mirrored_mean = mean.flip(1).contiguous()
        self._size = crop_size

    def apply(self, images: torch.Tensor, crops: torch.Tensor, out: torch.Tensor) -> None:
        """images: uint8 (batch, row, column, channel); crops: int32 (batch, 3), the row and column of the
        corner in each image, and whether to mirror it; out: float32 (batch, size, size, channel), written
        completely."""
        for image, (row, column, mirrored), result in zip(images, crops.tolist(), out, strict=True):
            across = slice(column, column + self._size)
            down = slice(row, row + self._size)
            if mirrored:
                opposite = image.shape[1] - column - self._size
                # channels first for flip: it has a fast path for images that lie channels last
                crop = image[down, across].permute(2, 0, 1).flip(2).permute(1, 2, 0)
                mean = self._mirrored_mean[down, opposite : opposite + self._size]
            else:
                crop, mean = image[down, across], self._mean[down, across]
            result.copy_(crop).sub_(mean)
