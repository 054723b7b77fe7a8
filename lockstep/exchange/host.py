"""Collectives in shared host memory: every rank maps all blocks, and reads and writes them directly."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from lockstep.comm.group import Group
from lockstep.exchange import Op, Span
from lockstep.exchange.direct import DirectTransport
from lockstep.exchange.reduction import CHUNK, chunks, reduce_chunk
from lockstep.exchange.transport import Collective
from lockstep.exchange.tree import PartialSums
from lockstep.memory import Block
from lockstep.memory.host import HostBlock, HostMemory

if TYPE_CHECKING:
    import torch

_Pieces = list[tuple[list[np.ndarray], list[np.ndarray]]]  # sources and targets of each chunk
_Sources = tuple[tuple[int, int], ...]  # a rank, and the element of its block at which span 0 begins
_Move = tuple[_Sources, tuple[int, ...], Span]  # what is read, the ranks that are written, and where
# Elements a thread; measured with an optimizer's step between reducing and scattering.
UPDATE_CHUNK = 4 * CHUNK


class HostTransport(DirectTransport):
    """A transport among the processes of one host.

    Args:
        blocks: Every rank's block as an array (n,), in rank order, all of one dtype.
        group: The processes.
        n_threads: Threads that reduce.
    """

    name = "shared host memory"

    def __init__(self, blocks: list[np.ndarray], group: Group, n_threads: int = 1) -> None:
        super().__init__(group, len(blocks[0]))
        self._blocks = blocks
        self._pieces: dict[_Move, _Pieces] = {}  # a cache: every step has the same moves
        self._n_threads, self.chunk = n_threads, UPDATE_CHUNK * n_threads
        self._threads = ThreadPoolExecutor(n_threads, "exchange") if n_threads > 1 else None

    @classmethod
    def open(
        cls, block: HostBlock, dtype: DTypeLike, n_elements: int, group: Group, n_threads: int = 1
    ) -> "HostTransport":
        """Share this rank's block and open those of the others. All ranks call it at once.

        Args:
            block: This rank's.
            dtype: Of the elements.
            n_elements: The size of every block.
            group: The processes.
            n_threads: Threads that reduce.
        """
        blocks = {group.world.rank: block.array(dtype, (n_elements,))}
        for pipe in group.pipes.values():
            block.send(pipe)
        for rank, pipe in group.pipes.items():
            theirs = HostMemory().receive(pipe, "its block")
            assert theirs.n_bytes == block.n_bytes, f"{pipe.peer}'s block has another size"
            blocks[rank] = theirs.array(dtype, (n_elements,))
            theirs.close()  # the array keeps the mapping
        return cls([blocks[rank] for rank in sorted(blocks)], group, n_threads)

    def another(self, block: Block, flat: "torch.Tensor") -> "HostTransport":
        assert isinstance(block, HostBlock)
        return self.open(block, flat.numpy().dtype, len(flat), self.group, self._n_threads)

    def reduce_shard(self, span: Span, op: Op) -> None:
        self._move(list(range(self.group.world.size)), (self.group.world.rank,), span, op)

    def scatter_shard(self, span: Span) -> None:
        rank = self.group.world.rank
        self._move([rank], tuple(self.group.pipes), span, "sum")

    def work(self, collective: Collective) -> None:
        sources, targets, span = self.parts(collective)
        self._move(sources, tuple(targets), span, collective.op)

    def close(self) -> None:
        self._pieces, self._blocks = {}, []
        if self._threads:
            self._threads.shutdown()

    def use_partial_sums(self, partial_sums: PartialSums) -> None:
        super().use_partial_sums(partial_sums)
        self._pieces.clear()

    def _move(self, ranks: list[int], targets: tuple[int, ...], span: Span, op: Op) -> None:
        """Reduce a span of the ranks' blocks into the targets', chunk by chunk."""
        sources = self.partial_sums.sources if op == "pairwise" else tuple((rank, 0) for rank in ranks)
        shape = self.partial_sums.shape
        key = sources, targets, span
        if key not in self._pieces:
            self._pieces[key] = self._cut(sources, targets, span)
        pieces = self._pieces[key]
        if self._threads and len(pieces) > 1:
            list(self._threads.map(lambda piece: reduce_chunk(piece[0], piece[1], op, shape), pieces))
            return
        for each, all_targets in pieces:
            reduce_chunk(each, all_targets, op, shape)

    def _cut(self, sources: _Sources, targets: tuple[int, ...], span: Span) -> _Pieces:
        (first, last), places = span, tuple((rank, 0) for rank in targets)
        is_own_block = sources == places and len(places) == 1
        if is_own_block or first == last:
            return []
        used = sorted({*sources, *places})
        cut = chunks([self._blocks[rank][start + first : start + last] for rank, start in used])
        arrays = [dict(zip(used, chunk, strict=True)) for chunk in cut]  # one object where source is target
        return [([each[place] for place in sources], [each[place] for place in places]) for each in arrays]
