"""Collectives in shared host memory: every block is mapped here, and read and written like one's own."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import DTypeLike

from lockstep.comm.group import Group
from lockstep.exchange.fold import chunks, fold
from lockstep.exchange.transport import Collective, Transport
from lockstep.memory.host import HostBlock, HostMemory

_Pieces = list[tuple[list[np.ndarray], list[np.ndarray]]]  # sources and targets of each chunk


class HostTransport(Transport):
    """blocks: every rank's as one array (n,), in rank order, all of one dtype. n_threads: that fold."""

    name = "shared host memory"

    def __init__(self, blocks: list[np.ndarray], group: Group, n_threads: int = 1) -> None:
        super().__init__(group, len(blocks[0]))
        self._blocks = blocks
        self._pieces: dict[Collective, _Pieces] = {}  # of the collectives so far, which come again
        self._threads = ThreadPoolExecutor(n_threads, "exchange") if n_threads > 1 else None

    @classmethod
    def open(
        cls, block: HostBlock, dtype: DTypeLike, n_elements: int, group: Group, n_threads: int = 1
    ) -> "HostTransport":
        """Shares this rank's block, and opens those of the others. All ranks call it at once."""
        blocks = {group.world.rank: block.array(dtype, (n_elements,))}
        for pipe in group.pipes.values():
            block.send(pipe)
        for rank, pipe in group.pipes.items():
            theirs = HostMemory().receive(pipe, "its block")
            assert theirs.n_bytes == block.n_bytes, f"{pipe.peer}'s block has another size"
            blocks[rank] = theirs.array(dtype, (n_elements,))
            theirs.close()  # the array keeps the mapping
        return cls([blocks[rank] for rank in sorted(blocks)], group, n_threads)

    def offer(self, collective: Collective) -> None:
        """A processor has done what it was told when the next line is reached."""

    def accept(self) -> None:
        """As above."""

    def work(self, collective: Collective) -> None:
        if collective not in self._pieces:
            self._pieces[collective] = self._cut(collective)
        pieces = self._pieces[collective]
        if self._threads and len(pieces) > 1:
            list(self._threads.map(lambda piece: fold(piece[0], piece[1], collective.op), pieces))
            return
        for sources, targets in pieces:
            fold(sources, targets, collective.op)

    def settle(self, collective: Collective) -> None:
        """As above."""

    def close(self) -> None:
        self._pieces, self._blocks = {}, []
        if self._threads:
            self._threads.shutdown()

    def _cut(self, collective: Collective) -> _Pieces:
        sources, targets, (first, last) = self.parts(collective)
        if sources == targets == sources[:1] or first == last:  # nothing comes from elsewhere
            return []
        used = sorted({*sources, *targets})
        cut = chunks([self._blocks[rank][first:last] for rank in used])
        arrays = [dict(zip(used, chunk, strict=True)) for chunk in cut]
        return [([each[rank] for rank in sources], [each[rank] for rank in targets]) for each in arrays]
