"""Changes of single images by Pillow: automatic policies, jitter of color, rotation."""

import math
from abc import ABC, abstractmethod

import numpy as np
from PIL import Image

from lockstep.config import Config
from lockstep.config.augmentation import auto_augment_args_of, jitter_of
from lockstep.data import operations
from lockstep.data.randomness import Purpose, generator


class Change(ABC):
    """A random change of RGB images, whose choices are drawn for all samples of an epoch."""

    @abstractmethod
    def draw(self, seed: int, epoch: int, n_samples: int) -> None:
        """Draw the choices for samples 0 to n_samples - 1."""

    @abstractmethod
    def apply(self, image: Image.Image, sample: int) -> Image.Image:
        """Return the changed image of a sample. It has the same size."""


class AutoAugment(Change):
    """A number of operations from a table, each image with others.

    Args:
        table: The operations.
        n: Operations for each image.
        magnitude: The bin of all amounts. None: a random one for each operation.
    """

    def __init__(self, table: list[operations.ImageOperation], n: int, magnitude: int | None) -> None:
        self._table, self._n, self._magnitude = table, n, magnitude
        self._n_bins = len(table[0].amounts)

    def draw(self, seed: int, epoch: int, n_samples: int) -> None:
        random, shape = generator(seed, epoch, Purpose.AUTO_AUGMENT), (n_samples, self._n)
        self._operations = random.integers(len(self._table), size=shape, dtype=np.uint8)
        self._bins = random.integers(self._n_bins, size=shape, dtype=np.uint8)
        self._signs = random.integers(2, size=shape, dtype=np.uint8)
        if self._magnitude is not None:
            self._bins[:] = self._magnitude

    def choices(self, sample: int) -> list[tuple[operations.ImageOperation, float]]:
        """Return the operations of a sample, each with its amount."""
        drawn = zip(self._operations[sample], self._bins[sample], self._signs[sample], strict=True)
        chosen = []
        for number, place, sign in drawn:
            operation = self._table[number]
            amount = operation.amounts[place]
            chosen.append((operation, -amount if sign and operation.is_signed else amount))
        return chosen

    def apply(self, image: Image.Image, sample: int) -> Image.Image:
        for operation, amount in self.choices(sample):
            image = operation.apply(image, amount)
        return image


class ColorJitter(Change):
    """Random brightness, contrast, saturation and hue in random order, as in torchvision.

    Args:
        strengths: Brightness, contrast and saturation are multiplied by factors from 1 - strength (at least
            0) to 1 + strength. Hues turn by up to the last strength; 1 is the whole circle.
    """

    def __init__(self, strengths: tuple[float, float, float, float]) -> None:
        self._strengths = strengths

    def draw(self, seed: int, epoch: int, n_samples: int) -> None:
        random = generator(seed, epoch, Purpose.JITTER)
        *factors, hue = self._strengths
        lows, highs = [max(0.0, 1 - most) - 1 for most in factors], list(factors)
        amounts = random.uniform([*lows, -hue], [*highs, hue], (n_samples, 4))
        self._amounts = amounts.astype(np.float32)
        self._order = random.permuted(np.tile(np.arange(4, dtype=np.uint8), (n_samples, 1)), axis=1)

    def apply(self, image: Image.Image, sample: int) -> Image.Image:
        amounts = self._amounts[sample].tolist()
        for number in self._order[sample].tolist():
            if self._strengths[number]:
                image = _JITTERS[number](image, amounts[number])
        return image

    def describe(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `apply` does to samples, for a kernel.

        Returns:
            The order of brightness, contrast, saturation and hue as int8 (n, 4), -1 for those that are not
            changed, and float32 (n, 4): their factors, and what is added to hues, modulo 256.
        """
        is_used = np.array(self._strengths) > 0
        order = self._order[samples].astype(np.int8)
        factors = 1 + self._amounts[samples].astype(np.float64)
        factors[:, 3] = np.trunc(self._amounts[samples, 3].astype(np.float64) * 255) % 256
        return np.where(is_used[order], order, -1), factors.astype(np.float32)


class Rotation(Change):
    """A rotation around the center by a random angle up to `most` degrees; black comes in."""

    def __init__(self, most: float) -> None:
        self._most = most

    def draw(self, seed: int, epoch: int, n_samples: int) -> None:
        random = generator(seed, epoch, Purpose.ROTATE)
        self._angles = random.uniform(-self._most, self._most, n_samples).astype(np.float32)

    def apply(self, image: Image.Image, sample: int) -> Image.Image:
        return image.rotate(float(self._angles[sample]), Image.Resampling.BILINEAR)


def turn_hue(image: Image.Image, share: float) -> Image.Image:
    """Turn all hues by a share of the circle, from -0.5 to 0.5."""
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(math.trunc(share * 255) % 256)  # modulo 256
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


_JITTERS: tuple[operations.Apply, ...] = (
    operations.brightness,
    operations.contrast,
    operations.color,
    turn_hue,
)


def changes_of(config: Config, size: tuple[int, int]) -> list[Change]:
    """Return a configuration's changes in their order, for images of `size`: (rows, columns)."""
    changes: list[Change] = []
    if config.rotate:
        changes.append(Rotation(config.rotate))
    if any(jitter_of(config)):
        changes.append(ColorJitter(jitter_of(config)))
    if config.auto_augment:
        args = auto_augment_args_of(config)
        tables = {"trivial": operations.trivial_table, "rand": operations.rand_table}
        table = tables[config.auto_augment](size, args["bins"])
        changes.append(AutoAugment(table, args.get("n", 1), args.get("magnitude")))
    return changes
