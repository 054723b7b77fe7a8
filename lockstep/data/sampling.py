"""The order of an epoch's samples, and how minibatches are cut from it.

A *run* is a stretch of rows of one file. An epoch's order is a sequence of runs that holds every sample once;
it knows nothing of devices, so N trainers with batches of B see what one trainer with batches of N x B sees.

A *position* counts samples from the epoch's start. A *minibatch* is what all trainers together take in one
step, positions [start, stop); trainer r takes its share, a contiguous part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.data.randomness import Purpose, generator

Shuffle = Literal["none", "batches", "blocks"]


@dataclass(frozen=True)
class Rows:
    """`count` rows of file number `file`, from row `first` on."""

    file: int
    first: int
    count: int


class EpochSamples:
    """The order of one epoch's samples.

    shuffle 'none': file by file. 'batches': the files in random order, each read through (as theano_alexnet).
    'blocks': every file is cut into blocks of `block` rows, and all blocks are put in random order.
    """

    def __init__(
        self, file_rows: tuple[int, ...], shuffle: Shuffle, block: int, seed: int, epoch: int
    ) -> None:
        longest = block if shuffle == "blocks" else max(file_rows)
        starts = [np.arange(0, rows, longest) for rows in file_rows]
        files = np.repeat(np.arange(len(file_rows)), [len(start) for start in starts])
        firsts = np.concatenate(starts)
        counts = np.minimum(longest, np.asarray(file_rows)[files] - firsts)
        if shuffle != "none":
            order = generator(seed, epoch, Purpose.ORDER).permutation(len(files))
            files, firsts, counts = files[order], firsts[order], counts[order]
        self._files, self._firsts, self._ends = files, firsts, np.cumsum(counts)
        self._counts = counts
        self._file_starts = np.concatenate([[0], np.cumsum(file_rows)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, start: int, stop: int) -> list[Rows]:
        """The rows at positions [start, stop), in order."""
        assert 0 <= start <= stop <= len(self)
        found = []
        run = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, count = int(self._ends[run]), int(self._counts[run])
            first = int(self._firsts[run]) + start - (end - count)
            found.append(Rows(int(self._files[run]), first, min(end, stop) - start))
            start, run = end, run + 1
        return found

    def samples(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions [start, stop) as int64; a sample's number is its row over all files."""
        parts = [
            self._file_starts[rows.file] + rows.first + np.arange(rows.count)
            for rows in self.rows(start, stop)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def minibatches(n_samples: int, size: int, position: int = 0) -> Iterator[tuple[int, int]]:
    """(start, stop) of each minibatch from `position` on; the last one may be smaller than `size`."""
    for start in range(position, n_samples, size):
        yield start, min(start + size, n_samples)


def share(start: int, stop: int, rank: int, n_trainers: int) -> tuple[int, int]:
    """The part of a minibatch that a trainer takes: shares differ by one sample at most, and
    trainer 0, which writes the checkpoints, always has one."""

    def boundary(number: int) -> int:
        return start + -(-(stop - start) * number // n_trainers)  # rounded up

    return boundary(rank), boundary(rank + 1)
