"""Images in theano_alexnet's layout, (channel, row, column, batch), turned into (batch, row, column,
channel).

In the old layout the bytes of one image lie a whole batch apart. A plain transposing copy touches memory in
an order that no cache likes: 190 ms for 256 images of 256 x 256, where copying takes 2.4. Here a few hundred
pixels of all images are read at a time, which fit into a core's cache; four neighbouring bytes of an image
are packed into one number with whole-array operations, and the numbers are transposed, a quarter as many. 19
ms.
"""

from collections.abc import Callable

import numpy as np

PIXELS = 512  # of all images, handled at a time: 0.4 MB of a file with 256 images


def read_images(
    read: Callable[[int, int, np.ndarray], None], shape: tuple[int, ...], first: int, out: np.ndarray
) -> None:
    """Fills `out`, uint8 (images, row, column, 3), with the images from number `first` on.

    shape: of the stored array, (3, row, column, batch). read(channel, pixel, planes) fills `planes`, uint8
    (pixels, batch), with what the file has for `channel` from pixel number `pixel` on.
    """
    n_pixels = shape[1] * shape[2]
    rows = out.reshape(len(out), 3 * n_pixels)
    buffer = np.empty((3, min(PIXELS, n_pixels), shape[3]), np.uint8)
    interleaver = Interleaver(len(out))
    for pixel in range(0, n_pixels, PIXELS):
        planes = buffer[:, : n_pixels - pixel]
        for channel in range(3):
            read(channel, pixel, planes[channel])
        part = planes[:, :, first : first + len(out)]
        interleaver.apply(part, rows[:, 3 * pixel : 3 * (pixel + PIXELS)])


class Interleaver:
    """Transposes up to PIXELS pixels of images at a time. Keeps its scratch memory: making it anew costs
    more."""

    def __init__(self, n_images: int) -> None:
        n_bytes = 3 * PIXELS
        self._bytes = np.empty((n_bytes, n_images), np.uint8)
        self._pairs = np.empty((2, n_bytes // 2, n_images), np.uint16)
        self._words = np.empty((2, n_bytes // 4, n_images), np.uint32)

    def apply(self, planes: np.ndarray, out: np.ndarray) -> None:
        """Writes `planes`, uint8 (3, pixels, images), as `out`, uint8 (images, 3 * pixels), channels
        together."""
        n_bytes = out.shape[1]
        by_pixel = self._bytes[:n_bytes]
        by_pixel.reshape(-1, *planes.shape[::2])[...] = planes.transpose(1, 0, 2)
        whole = n_bytes // 4 * 4
        words = _join(_join(by_pixel[:whole], self._pairs), self._words)
        out[:, :whole].view(np.uint32)[...] = words.T
        out[:, whole:] = by_pixel[whole:].T


def _join(rows: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Each two rows of unsigned numbers as one of numbers twice as wide; the first is the lower half."""
    lower: np.ndarray = scratch[0, : len(rows) // 2]
    upper: np.ndarray = scratch[1, : len(rows) // 2]
    lower[...], upper[...] = rows[0::2], rows[1::2]
    upper <<= 8 * rows.itemsize
    upper |= lower
    return upper


def from_b01c(images: np.ndarray) -> np.ndarray:
    """Images (batch, row, column, channel) in the old layout, a new array. Row by row, for the cache's
    sake."""
    out = np.empty((images.shape[3], *images.shape[1:3], len(images)), images.dtype)
    for row in range(images.shape[1]):
        out[:, row] = images[:, row].transpose(2, 1, 0)
    return out
