"""The operations of TrivialAugment and RandAugment on Pillow images, and their published magnitudes.

Each operation takes an RGB image and an amount. Where pixels come from outside the image, they are black.
The tables are those of Mueller, Hutter 2021 (arXiv 2103.10158, the wide space of table 1) and of Cubuk et al.
2020 (arXiv 1909.13719) as torchvision's reference has them, by 31 bins.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Apply = Callable[[Image.Image, float], Image.Image]

_FULL_SIDE = 331.0  # of the images for which RandAugment's table gives 150 pixels of translation


def identity(image: Image.Image, amount: float) -> Image.Image:
    """Return the image unchanged; the table's entry for no operation."""
    return image


def shear_x(image: Image.Image, amount: float) -> Image.Image:
    """Shear rows; `amount` is the tangent of the angle."""
    return _moved(image, (1, amount, 0, 0, 1, 0))


def shear_y(image: Image.Image, amount: float) -> Image.Image:
    """Shear columns; `amount` is the tangent of the angle."""
    return _moved(image, (1, 0, 0, amount, 1, 0))


def translate_x(image: Image.Image, amount: float) -> Image.Image:
    """Move the image to the right by whole pixels."""
    return _moved(image, (1, 0, -int(amount), 0, 1, 0))


def translate_y(image: Image.Image, amount: float) -> Image.Image:
    """Move the image down by whole pixels."""
    return _moved(image, (1, 0, 0, 0, 1, -int(amount)))


def rotate(image: Image.Image, amount: float) -> Image.Image:
    """Rotate the image around its center, counterclockwise by degrees."""
    return image.rotate(amount)


def brightness(image: Image.Image, amount: float) -> Image.Image:
    """Blend with black: -1 is black, 0 the image, 1 twice as bright."""
    return ImageEnhance.Brightness(image).enhance(1 + amount)


def color(image: Image.Image, amount: float) -> Image.Image:
    """Blend with the gray image: -1 is gray, 0 the image."""
    return ImageEnhance.Color(image).enhance(1 + amount)


def contrast(image: Image.Image, amount: float) -> Image.Image:
    """Blend with the mean gray: -1 is uniform, 0 the image."""
    return ImageEnhance.Contrast(image).enhance(1 + amount)


def sharpness(image: Image.Image, amount: float) -> Image.Image:
    """Blend with the smoothed image: -1 is smooth, 0 the image."""
    return ImageEnhance.Sharpness(image).enhance(1 + amount)


def posterize(image: Image.Image, amount: float) -> Image.Image:
    """Keep the `amount` highest bits of each value."""
    return ImageOps.posterize(image, int(amount))


def solarize(image: Image.Image, amount: float) -> Image.Image:
    """Invert the values from `amount` on."""
    return ImageOps.solarize(image, amount)  # type: ignore[arg-type]


def autocontrast(image: Image.Image, amount: float) -> Image.Image:
    """Stretch each color to 0 to 255."""
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image, amount: float) -> Image.Image:
    """Make each color's histogram flat."""
    return ImageOps.equalize(image)


def _moved(image: Image.Image, inverse: tuple[float, ...]) -> Image.Image:
    """Return the image through an affine map; `inverse` leads from a new pixel to the old one."""
    return image.transform(image.size, Image.Transform.AFFINE, inverse)


@dataclass(frozen=True)
class ImageOperation:
    """An operation of a table.

    Attributes:
        apply: Changes an image by an amount.
        amounts: The amount of each bin.
        is_signed: Whether the amount may be negative, with probability 1/2.
    """

    apply: Apply
    amounts: tuple[float, ...]
    is_signed: bool = False


def trivial_table(size: tuple[int, int], n_bins: int) -> list[ImageOperation]:
    """Return TrivialAugment's wide space, which is the same for images of any size."""
    geometry: dict[Apply, float] = {
        shear_x: 0.99,
        shear_y: 0.99,
        translate_x: 32,
        translate_y: 32,
        rotate: 135,
    }
    return _table(geometry, 0.99, 6, n_bins)


def rand_table(size: tuple[int, int], n_bins: int) -> list[ImageOperation]:
    """Return RandAugment's space for images of `size`: (rows, columns)."""
    down, across = (150.0 / _FULL_SIDE * side for side in size)
    geometry: dict[Apply, float] = {
        shear_x: 0.3,
        shear_y: 0.3,
        translate_x: across,
        translate_y: down,
        rotate: 30,
    }
    return _table(geometry, 0.9, 4, n_bins)


def _table(
    geometry: dict[Apply, float], enhancement: float, n_bits: int, n_bins: int
) -> list[ImageOperation]:
    """Return a space from the largest amounts; `n_bits` are lost at most by posterize."""
    bins, none = np.arange(n_bins) / (n_bins - 1), (0.0,) * n_bins
    bits, thresholds = 8 - np.round(n_bits * bins), np.linspace(255, 0, n_bins)  # exact for whole values
    enhancements = tuple((enhancement * bins).tolist())
    return [
        ImageOperation(identity, none),
        *(ImageOperation(apply, tuple((most * bins).tolist()), True) for apply, most in geometry.items()),
        *(ImageOperation(apply, enhancements, True) for apply in (brightness, color, contrast, sharpness)),
        ImageOperation(posterize, tuple(bits.tolist())),
        ImageOperation(solarize, tuple(thresholds.tolist())),
        ImageOperation(autocontrast, none),
        ImageOperation(equalize, none),
    ]
