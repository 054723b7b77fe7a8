"""The order of an epoch's samples, and the batches cut from it.

A *run* is a range of rows of one file. An epoch's order is a sequence of runs that holds every sample once.
It does not depend on devices: N trainers with batches of B see the samples of one trainer with batches of N x
B.

A *position* counts samples from the epoch's start. A *global batch* is the samples of all trainers in one
step, positions [start, stop). Trainer r takes its share, a contiguous part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.config.shares import share_of
from lockstep.data.randomness import Purpose, generator

Shuffle = Literal["none", "batches", "blocks"]


@dataclass(frozen=True)
class Rows:
    """A range of `count` rows of file number `file`, from row `first` on."""

    file: int
    first: int
    count: int


class EpochSamples:
    """The order of one epoch's samples.

    Args:
        file_rows: Number of rows in each file.
        shuffle: 'none': the stored order. 'batches': the files in random order, as in theano_alexnet.
            'blocks': blocks of `block` rows of all files in random order.
        block: Rows per block of 'blocks'.
        seed: The run's seed.
        epoch: The epoch's number.
    """

    def __init__(
        self, file_rows: tuple[int, ...], shuffle: Shuffle, block: int, seed: int, epoch: int
    ) -> None:
        longest = block if shuffle == "blocks" else max(file_rows)
        sizes = np.asarray(file_rows)
        n_runs = -(-sizes // longest)
        files = np.repeat(np.arange(len(sizes)), n_runs)
        firsts = longest * (np.arange(len(files)) - np.repeat(np.cumsum(n_runs) - n_runs, n_runs))
        counts = np.minimum(longest, sizes[files] - firsts)
        if shuffle != "none":
            order = generator(seed, epoch, Purpose.ORDER).permutation(len(files))
            files, firsts, counts = files[order], firsts[order], counts[order]
        self._files, self._firsts, self._ends = files, firsts, np.cumsum(counts)
        self._counts = counts
        self._file_starts = np.concatenate([[0], np.cumsum(sizes)])

    @classmethod
    def listed(cls, file_rows: tuple[int, ...], samples: np.ndarray) -> "EpochSamples":
        """Return the order that is these samples, int64 (n,), each of which is read separately."""
        order = cls(file_rows, "none", 1, 0, 0)
        order._files = np.searchsorted(order._file_starts, samples, side="right") - 1
        order._firsts = samples - order._file_starts[order._files]
        order._counts = np.ones(len(samples), np.int64)
        order._ends = np.cumsum(order._counts)
        return order

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, start: int, stop: int) -> list[Rows]:
        """Return the rows at positions [start, stop), in order."""
        assert 0 <= start <= stop <= len(self)
        ranges = []
        run = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, count = int(self._ends[run]), int(self._counts[run])
            first = int(self._firsts[run]) + start - (end - count)
            ranges.append(Rows(int(self._files[run]), first, min(end, stop) - start))
            start, run = end, run + 1
        return ranges

    def samples_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at any positions: int64 (n,) to int64 (n,)."""
        runs = np.searchsorted(self._ends, positions, side="right")
        begins = self._ends[runs] - self._counts[runs]
        samples: np.ndarray = self._file_starts[self._files[runs]] + self._firsts[runs] + positions - begins
        return samples

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the samples at positions [start, stop): int64, each its row's number over all files."""
        return self.samples_at(np.arange(start, stop))


def minibatches(n_samples: int, size: int, position: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each global batch from `position` on. The last one may be smaller."""
    for start in range(position, n_samples, size):
        yield start, min(start + size, n_samples)


def steps_done(epoch: int, position: int, n_samples: int, step_size: int) -> int:
    """Return the steps from the start of a run to a position, for epochs of whole steps before it.

    After a resume within an epoch with another step size, positions are no multiples of it. Counted are whole
    steps, and at the end of the epoch the last one, so that no two positions of the run have one number.

    Args:
        epoch: The current epoch, from 1.
        position: Samples of that epoch that have been trained on.
        n_samples: Samples per epoch.
        step_size: Samples per step.
    """
    n_steps = -(-n_samples // step_size)
    return (epoch - 1) * n_steps + (n_steps if position >= n_samples else position // step_size)


def share(start: int, stop: int, rank: int, n_trainers: int) -> tuple[int, int]:
    """Return the (start, stop) of a trainer's share of a global batch.

    Shares differ by one sample at most. Trainer 0, which writes the checkpoints, always has a sample.
    """
    return share_of(start, stop, (rank, rank + 1), n_trainers)
