"""Shifts of intensity and colour: Krizhevsky, Sutskever, Hinton 2012, section 4.1.

To every pixel of a training picture is added p1 a1 l1 + p2 a2 l2 + p3 a3 l3: p and l are eigenvectors and
eigenvalues of the covariance of red, green and blue over the training set's pixels, a three Gaussian numbers
of the picture's own. Eigenvalues depend on the unit of the pixels, which the paper does not name: here, as in
most programs since, pixels are from 0 to 1 for that, and the shift is then brought to 0 to 255.
"""

import numpy as np

from lockstep.data.dataset import Split
from lockstep.data.hkl import read_rows
from lockstep.data.randomness import Purpose, generator

_FILES, _ROWS = 32, 32  # 1,024 pictures of a large dataset, from all over it: 67 million pixels


def principal_components(split: Split) -> np.ndarray:
    """float64 (3, 3): in each row an eigenvalue times its eigenvector, in grey levels, the largest first.

    Of all pixels of up to 1,024 pictures, from evenly spaced files. Sums of whole numbers are exact, so every
    process has the same bits. Raises UserError naming a file that can't be read.
    """
    total, products, n_pixels = np.zeros(3), np.zeros((3, 3)), 0
    chosen = np.unique(np.linspace(0, len(split.files) - 1, _FILES).round().astype(int))
    for file in (split.files[number] for number in chosen):
        images = np.empty((min(_ROWS, file.shape[0]), *file.row_shape), np.uint8)
        read_rows(file, 0, images)
        pixels = images.reshape(-1, 3).astype(np.float64)
        total += pixels.sum(0)
        products += pixels.T @ pixels
        n_pixels += len(pixels)
    mean = total / n_pixels
    values, vectors = np.linalg.eigh((products / n_pixels - np.outer(mean, mean)) / 255**2)
    vectors *= np.sign(vectors.sum(0) + 1e-9)  # an eigenvector's sign is anybody's choice
    components: np.ndarray = 255 * (values.clip(0) * vectors).T[::-1]
    return components


def draw_shifts(seed: int, epoch: int, strength: float, components: np.ndarray, n_samples: int) -> np.ndarray:
    """What is added to R, G and B of each sample in an epoch, in grey levels: float32 (n_samples, 3).

    strength: the standard deviation of the Gaussian numbers; the paper's is 0.1.
    """
    amounts = strength * generator(seed, epoch, Purpose.COLOUR).standard_normal((n_samples, 3))
    first, second, third = (amounts[:, [number]] * components[number] for number in range(3))
    shifts: np.ndarray = (first + second + third).astype(np.float32)
    return shifts
