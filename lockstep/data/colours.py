"""Random shifts of intensity and color: Krizhevsky, Sutskever, Hinton 2012, section 4.1.

Every pixel of a training image gets p1 a1 l1 + p2 a2 l2 + p3 a3 l3 added. p and l are the eigenvectors and
eigenvalues of the covariance of red, green and blue over the training set's pixels. a are three Gaussian
numbers per image. Eigenvalues depend on the unit of pixels, which the paper does not name. This module uses
pixels from 0 to 1, as most programs do, and scales the shift to 0 to 255.
"""

import numpy as np

from lockstep.data.randomness import Purpose, generator
from lockstep.data.split import Split
from lockstep.errors import UserError

_FILES, _ROWS = 32, 32  # 1,024 images from the whole dataset: 67 million pixels; more files of fewer rows


def principal_components(split: Split) -> np.ndarray:
    """Return the principal components of the colors of about 1,024 images from evenly spaced files.

    Sums of integers are exact, so every process computes the same bits.

    Returns:
        float64 (3, 3): each row is an eigenvalue times its eigenvector, in gray levels, the largest first.

    Raises:
        UserError: A file can't be read; the message names it.
    """
    total, products, n_pixels = np.zeros(3), np.zeros((3, 3)), 0
    if split.image_shape[2] != 3:
        raise UserError(
            f"rand_color: is for images with 3 channels, not {split.image_shape[2]}. Set it to 0."
        )
    n_rows = [min(_ROWS, rows) for rows in split.file_rows]
    chosen = np.unique(np.linspace(0, len(n_rows) - 1, _FILES * _ROWS // max(n_rows)).round().astype(int))
    for file in chosen.tolist():
        images = np.empty((n_rows[file], *split.image_shape), np.uint8)
        split.read(file, 0, images)
        pixels = images.reshape(-1, 3).astype(np.float64)
        total += pixels.sum(0)
        products += pixels.T @ pixels
        n_pixels += len(pixels)
    mean = total / n_pixels
    values, vectors = np.linalg.eigh((products / n_pixels - np.outer(mean, mean)) / 255**2)
    vectors *= np.sign(vectors.sum(0) + 1e-9)  # fixes the sign of each eigenvector
    components: np.ndarray = 255 * (values.clip(0) * vectors).T[::-1]
    return components


def draw_shifts(seed: int, epoch: int, strength: float, components: np.ndarray, n_samples: int) -> np.ndarray:
    """Return the color shifts of all samples in an epoch.

    Args:
        seed: The run's seed.
        epoch: The epoch's number.
        strength: Standard deviation of the Gaussian numbers; 0.1 in the paper.
        components: The result of `principal_components`.
        n_samples: Number of samples in the epoch.

    Returns:
        float32 (n_samples, 3): shifts of R, G and B in gray levels.
    """
    amounts = strength * generator(seed, epoch, Purpose.COLOUR).standard_normal((n_samples, 3))
    first, second, third = (amounts[:, [number]] * components[number] for number in range(3))
    shifts: np.ndarray = (first + second + third).astype(np.float32)
    return shifts
