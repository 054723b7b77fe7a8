"""Random choices as functions of (seed, epoch, sample, purpose), independent of ranks and restarts.

The choices for all samples of an epoch are one table, indexed by the sample. It is drawn at once from a
Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") keyed with (seed, epoch,
purpose).
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The purpose of a random choice. Runs depend on these numbers: never reuse one."""

    ORDER = 1
    CROP_ROW = 2
    CROP_COLUMN = 3
    MIRROR = 4
    DROPOUT = 5
    INITIALISATION = 6
    STEP = 7
    PAIRS = 8
    COLOUR = 9
    # 10 was the rounding of an earlier network_dtype
    SAMPLER = 11
    BOX = 20
    ROTATE = 21
    JITTER = 22
    AUTO_AUGMENT = 23
    OWN = 24
    ERASE = 25
    MIX = 26


def generator(seed: int, epoch: int, purpose: Purpose, *sample: int) -> np.random.Generator:
    """Return a new generator for one purpose in one epoch, or for one sample in it."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, purpose, *sample])))


def draw(seed: int, epoch: int, purpose: Purpose, n_samples: int, n_choices: int) -> np.ndarray:
    """Return an integer from 0 to n_choices - 1 for each sample: int64 (n_samples,)."""
    return generator(seed, epoch, purpose).integers(n_choices, size=n_samples)


def seed_of(purpose: Purpose, *numbers: int) -> int:
    """Return a 64-bit seed for torch's generator. Close numbers give unrelated seeds."""
    return int(np.random.SeedSequence([purpose, *numbers]).generate_state(1, np.uint64)[0])
