"""Every random choice is a function of (seed, epoch, sample, purpose), never of rank, process or restart.

A choice for the samples of an epoch is a table, drawn at once from a Philox generator (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3") keyed with (seed, epoch, purpose) and indexed by the sample.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a random choice is for. The numbers are part of what a seed means: never reuse one."""

    ORDER = 1
    CROP_ROW = 2
    CROP_COLUMN = 3
    MIRROR = 4
    DROPOUT = 5
    INITIALISATION = 6
    STEP = 7
    PAIRS = 8
    COLOUR = 9
    WIRE = 10


def generator(seed: int, epoch: int, purpose: Purpose) -> np.random.Generator:
    """A fresh generator for one purpose in one epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, purpose])))


def draw(seed: int, epoch: int, purpose: Purpose, n_samples: int, n_choices: int) -> np.ndarray:
    """For each sample a whole number from 0 to n_choices - 1: int64 of shape (n_samples,)."""
    return generator(seed, epoch, purpose).integers(n_choices, size=n_samples)


def seed_of(purpose: Purpose, *words: int) -> int:
    """A 64-bit seed for torch's own generator, well spread over whole numbers that may be close."""
    return int(np.random.SeedSequence([purpose, *words]).generate_state(1, np.uint64)[0])
