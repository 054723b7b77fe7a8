"""Host memory by number: blocks that the caller allocates and every rank can open.

The caller numbers its blocks, and sends each to a rank at most once, before the first command that needs it.
From then on a number and an offset say where an array lies, in every process.
"""

from dataclasses import dataclass

import numpy as np

from lockstep.memory.host import HostBlock

ALIGNMENT = 64  # bytes: arrays begin on a cache line, as numba and BLAS like it


@dataclass(frozen=True, slots=True)
class Span:
    """Where an array lies: C-contiguous, in a block, from a byte on."""

    block: int
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


def align(n_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Blocks:
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

    def add(self, number: int, block: HostBlock) -> None:
        self._open[number] = block

    def add_failure(self, number: int, error: Exception) -> None:
        """Remembers why a block could not be opened: who needs it hears of it."""
        self._failed[number] = error

    def drop(self, number: int) -> None:
        """Lets go of a block; arrays on it that are still in use keep its memory."""
        self._failed.pop(number, None)
        block = self._open.pop(number, None)
        if block is not None:
            block.close()

    def close(self) -> None:
        """Lets go of all; arrays on them stay what they are."""
        for number in list(self._open):
            self.drop(number)

    def array(self, span: Span) -> np.ndarray:
        """The array there, not a copy."""
        return self[span.block].array(span.dtype, span.shape, span.offset)
