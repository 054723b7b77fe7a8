"""Mixing of images in pairs.

Mixup is Zhang et al. 2018 (arXiv 1710.09412), CutMix is Yun et al. 2019 (arXiv 1905.04899).

The partner of an image is another one of the same step, at a random distance that all images of the step
share. Which images are mixed, how, and with which partner depends on the seed, the epoch and the place in
the epoch only, so it is the same for any number of trainers.
"""

from dataclasses import dataclass

import numpy as np

from lockstep.config import Config
from lockstep.data.randomness import Purpose, generator

PARTS = 256  # weights are multiples of one over this, so that images and labels have exactly the same


@dataclass(frozen=True)
class Mixing:
    """A plan for mixing images at consecutive positions.

    Attributes:
        partners: The position of each image's partner, int64 (n,).
        weights: The own image's share in the result, float32 (n,).
        boxes: The part that is replaced by the partner's, int32 (n, 4): first row, first column, rows,
            columns. Without rows the whole images are blended.
    """

    partners: np.ndarray
    weights: np.ndarray
    boxes: np.ndarray


def unmixed(first: int, last: int) -> Mixing:
    """Return the mixing that leaves images as they are."""
    n = last - first
    return Mixing(np.arange(first, last), np.ones(n, np.float32), np.zeros((n, 4), np.int32))


class Mixer:
    """The choices of one epoch. Images have `size`: (rows, columns)."""

    def __init__(self, config: Config, size: tuple[int, int]) -> None:
        self._config, self._size = config, np.array(size)

    def begin_epoch(self, epoch: int, n_samples: int) -> None:
        """Draw the choices for all positions of an epoch."""
        config = self._config
        random = generator(config.seed, epoch, Purpose.MIX)
        mixed = random.random(n_samples) < config.mix_prob
        cut = random.random(n_samples) < (0.5 if config.mixup and config.cutmix else bool(config.cutmix))
        self._distances = random.random(n_samples)
        blend = random.beta(config.mixup, config.mixup, n_samples) if config.mixup else np.ones(n_samples)
        kept = random.beta(config.cutmix, config.cutmix, n_samples) if config.cutmix else np.ones(n_samples)
        centers = random.random((n_samples, 2))
        if config.mix_off_epoch is not None and epoch >= config.mix_off_epoch:
            mixed[:] = False
        self._boxes = _boxes(kept, centers, self._size)
        self._boxes[~(mixed & cut)] = 0
        weights = np.where(mixed & ~cut, np.rint(blend * PARTS) / PARTS, 1.0)
        replaced = self._boxes[:, 2] * self._boxes[:, 3] / self._size.prod()
        self._weights = np.where(mixed & cut, 1 - replaced, weights).astype(np.float32)

    def choose_partners(self, start: int, stop: int, first: int, last: int) -> Mixing:
        """Return partners, weights and boxes of positions [first, last) of the step [start, stop)."""
        size, positions = stop - start, np.arange(first, last)
        distance = 1 + int(self._distances[start] * (size - 1)) if size > 1 else 0
        partners = start + (positions - start + distance) % size
        weights = self._weights[positions]
        return Mixing(np.where(weights < 1, partners, positions), weights, self._boxes[positions])


def _boxes(kept: np.ndarray, centers: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return CutMix's rectangles: a share of 1 - kept around the centers, cut off at the image's edges."""
    halves = (np.sqrt(1 - kept)[:, None] * size).astype(np.int64) // 2
    places = (centers * size).astype(np.int64)
    begins, ends = (places - halves).clip(0, size), (places + halves).clip(0, size)
    sides = ends - begins
    sides[(sides == 0).any(1)] = 0
    return np.concatenate([begins, sides], 1).astype(np.int32)


def mix(image: np.ndarray, partner: np.ndarray, weight: float, box: np.ndarray, out: np.ndarray) -> None:
    """Mix an image with its partner, as one row of `Mixing` says.

    Args:
        image: uint8 (row, column, channel), like partner and out.
        partner: The other image.
        weight: The image's share in the result.
        box: The part to replace by the partner's, int32 (4,).
        out: Overwritten.
    """
    np.copyto(out, image)
    row, column, n_rows, n_columns = box.tolist()
    if n_rows:
        part = np.s_[row : row + n_rows, column : column + n_columns]
        out[part] = partner[part]
    elif weight < 1:
        own = round(weight * PARTS)
        blend = image * np.uint16(own)
        blend += partner * np.uint16(PARTS - own)
        blend += np.uint16(PARTS // 2)
        blend >>= 8
        np.copyto(out, blend, casting="unsafe")
