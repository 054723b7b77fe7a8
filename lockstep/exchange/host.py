"""Collectives in shared host memory: every block is mapped here, and read and written like one's own."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from lockstep.comm.group import Group
from lockstep.exchange import Op, Span
from lockstep.exchange.direct import DirectTransport
from lockstep.exchange.fold import CHUNK, chunks, fold
from lockstep.exchange.transport import Collective
from lockstep.memory import Block
from lockstep.memory.host import HostBlock, HostMemory

if TYPE_CHECKING:
    import torch

_Pieces = list[tuple[list[np.ndarray], list[np.ndarray]]]  # sources and targets of each chunk
_Move = tuple[tuple[int, ...], tuple[int, ...], Span]  # ranks from and to which a span goes
UPDATE_CHUNK = 4 * CHUNK  # elements a thread; measured with an optimizer's step between fold and spread


class HostTransport(DirectTransport):
    """blocks: every rank's as one array (n,), in rank order, all of one dtype. n_threads: that fold."""

    name = "shared host memory"

    def __init__(self, blocks: list[np.ndarray], group: Group, n_threads: int = 1) -> None:
        super().__init__(group, len(blocks[0]))
        self._blocks = blocks
        self._pieces: dict[_Move, _Pieces] = {}  # of the moves so far, which come again
        self._n_threads, self.chunk = n_threads, UPDATE_CHUNK * n_threads
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

    def another(self, block: Block, flat: "torch.Tensor") -> "HostTransport":
        assert isinstance(block, HostBlock)
        return self.open(block, flat.numpy().dtype, len(flat), self.group, self._n_threads)

    def fold(self, span: Span, op: Op) -> None:
        everyone, rank = range(self.group.world.size), self.group.world.rank
        self._move(tuple(everyone), (rank,), span, op)

    def spread(self, span: Span) -> None:
        rank = self.group.world.rank
        self._move((rank,), tuple(self.group.pipes), span, "sum")

    def work(self, collective: Collective) -> None:
        sources, targets, span = self.parts(collective)
        self._move(tuple(sources), tuple(targets), span, collective.op)

    def settle(self, collective: Collective) -> None:
        """As above."""

    def close(self) -> None:
        self._pieces, self._blocks = {}, []
        if self._threads:
            self._threads.shutdown()

    def _move(self, sources: tuple[int, ...], targets: tuple[int, ...], span: Span, op: Op) -> None:
        """Folds a span of the sources' blocks into the targets', chunk by chunk."""
        key = sources, targets, span
        if key not in self._pieces:
            self._pieces[key] = self._cut(sources, targets, span)
        pieces = self._pieces[key]
        if self._threads and len(pieces) > 1:
            list(self._threads.map(lambda piece: fold(piece[0], piece[1], op), pieces))
            return
        for each, all_targets in pieces:
            fold(each, all_targets, op)

    def _cut(self, sources: tuple[int, ...], targets: tuple[int, ...], span: Span) -> _Pieces:
        first, last = span
        if sources == targets == sources[:1] or first == last:  # nothing comes from elsewhere
            return []
        used = sorted({*sources, *targets})
        cut = chunks([self._blocks[rank][first:last] for rank in used])
        arrays = [dict(zip(used, chunk, strict=True)) for chunk in cut]
        return [([each[rank] for rank in sources], [each[rank] for rank in targets]) for each in arrays]
