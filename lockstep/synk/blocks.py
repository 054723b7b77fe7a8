"""Numbered blocks of host memory, which the caller allocates and every rank can open.

The caller sends each block to a rank at most once, before the first command that needs it. From then on a
number and an offset identify an array in every process.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.memory.host import HostBlock

ALIGNMENT = 64  # bytes: arrays start on a cache line, which numba and BLAS read fastest


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """The location of a C-contiguous array: a block, and an offset in bytes."""

    block: int
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


def align(n_bytes: int) -> int:
    """Return n_bytes rounded up to a multiple of ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def arrange(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of arrays of these sizes, one after another in a block, and the block's size."""
    *offsets, n_bytes = itertools.accumulate(map(align, sizes), initial=0)
    return offsets, n_bytes


class BlockTable:
    """The blocks that are open in this process, by number."""

    def __init__(self) -> None:
        self._open: dict[int, HostBlock] = {}
        self._failed: dict[int, Exception] = {}

    def __getitem__(self, number: int) -> HostBlock:
        if number in self._failed:
            raise self._failed[number]
        return self._open[number]

    def __len__(self) -> int:
        return len(self._open)

    @property
    def failed(self) -> tuple[int, ...]:
        """The numbers of the blocks that could not be opened."""
        return tuple(self._failed)

    def add(self, number: int, block: HostBlock) -> None:
        """Store an open block under its number."""
        self._failed.pop(number, None)
        self._open[number] = block

    def add_failure(self, number: int, error: Exception) -> None:
        """Store the error of a block that could not be opened; reading the block raises it."""
        self._failed[number] = error

    def drop(self, number: int) -> None:
        """Close a block; arrays on it that are still in use keep its memory."""
        self._failed.pop(number, None)
        block = self._open.pop(number, None)
        if block is not None:
            block.close()

    def close(self) -> None:
        """Close all blocks; arrays on them stay valid."""
        for number in list(self._open):
            self.drop(number)

    def array(self, location: ArrayLocation) -> np.ndarray:
        """Return the array at this location. No copy."""
        return self[location.block].array(location.dtype, location.shape, location.offset)
