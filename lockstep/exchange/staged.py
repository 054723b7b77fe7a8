"""Collectives on GPUs that can't reach each other: through page-locked host memory that all ranks share.

The same shards, kernel and bits as peer to peer. Each rank's *stage* is host memory that all map: a place for
every element of its block, from which the others fetch, and behind these as many for results.

Nothing here needs CUDA IPC. A host waits for its own device before each barrier; then the barriers alone put
everything in order. A result has a place of its own because others may still be fetching it when the next
collective's elements are offered: they are done with it before that one's first barrier, and the place is
written after it.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.comm.group import Group
from lockstep.exchange import ALIGNMENT, Op, Span, shard
from lockstep.exchange.direct import DirectTransport
from lockstep.exchange.p2p import FoldKernel
from lockstep.exchange.transport import Collective
from lockstep.memory import Block
from lockstep.memory.cuda import CudaBlock, CudaMemory
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.memory.pagelock import pagelock, unlock

if TYPE_CHECKING:
    import torch

_FLOAT = 4  # bytes
_REDUCING = ("all_reduce", "reduce_scatter")


class StagedTransport(DirectTransport):
    """block: this rank's n_elements float32. stream: in which this rank computes."""

    name = "staged through host memory"

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, group: Group
    ) -> None:
        super().__init__(group, n_elements)
        self._memory, self._driver, self._stream, self._block = memory, memory.driver, stream, block
        most = n_elements // group.world.size + 2 * ALIGNMENT  # elements in the shard of any span
        self._stages = self._open_stages(2 * n_elements)
        self._offered = {rank: stage.array(np.float32, (n_elements,)) for rank, stage in self._stages.items()}
        self._results = {
            rank: stage.array(np.float32, (n_elements,), _FLOAT * n_elements)
            for rank, stage in self._stages.items()
        }
        self._fetched = {rank: memory.allocate(_FLOAT * most, "others' shards") for rank in group.pipes}
        self._kernel = FoldKernel(memory, stream)

    def another(self, block: Block, flat: "torch.Tensor") -> "StagedTransport":
        assert isinstance(block, CudaBlock)
        return StagedTransport(self._memory, self._stream, block, len(flat), self.group)

    def fold(self, span: Span, op: Op) -> None:
        self._reduce(span, op)

    def spread(self, span: Span) -> None:
        self._copy_out(self._results[self.group.world.rank][slice(*span)], span[0])

    def worked(self) -> None:
        self._stream.synchronize()

    def offer(self, collective: Collective) -> None:
        for first, last in self._wanted_by_others(collective):
            self._copy_out(self._offered[self.group.world.rank][first:last], first)
        self._stream.synchronize()

    def accept(self) -> None:
        """The hosts have waited for their devices before they came to the barrier."""

    def work(self, collective: Collective) -> None:
        if collective.kind in _REDUCING:
            self._reduce(self.shard(collective.span), collective.op)
            if collective.kind == "all_reduce":
                self.spread(self.shard(collective.span))
        elif collective.kind == "all_gather":
            for rank in self.group.pipes:
                self._fetch(rank, self._shard_of(rank, collective.span))
        elif self.group.world.rank != collective.source:
            self._fetch(collective.source, collective.span)
        self._stream.synchronize()

    def settle(self, collective: Collective) -> None:
        if collective.kind == "all_reduce":
            for rank in self.group.pipes:
                first, last = self._shard_of(rank, collective.span)
                self._copy_in(self._block.pointer + _FLOAT * first, self._results[rank][first:last])

    def close(self) -> None:
        self._stream.synchronize()
        self.group.barrier("nobody uses the stages of the others any more")
        for stage in self._stages.values():
            unlock(stage)
            stage.close()
        for block in self._fetched.values():
            block.close()

    def _wanted_by_others(self, collective: Collective) -> list[Span]:
        """What of this rank's block others need."""
        if collective.kind in _REDUCING:
            return [self._shard_of(rank, collective.span) for rank in self.group.pipes]
        if collective.kind == "all_gather":
            return [self.shard(collective.span)]
        return [collective.span] if self.group.world.rank == collective.source else []

    def _reduce(self, span: Span, op: Op) -> None:
        """Folds a span of what all have offered into this rank's block."""
        first, last = span
        for rank, block in self._fetched.items():
            self._copy_in(block.pointer, self._offered[rank][first:last])
        mine = self._block.pointer + _FLOAT * first
        addresses = {self.group.world.rank: mine, **{rank: b.pointer for rank, b in self._fetched.items()}}
        sources = [addresses[rank] for rank in sorted(addresses)]
        self._kernel.launch(sources, [mine], (0, last - first), op)

    def _fetch(self, rank: int, span: Span) -> None:
        first, last = span
        self._copy_in(self._block.pointer + _FLOAT * first, self._offered[rank][first:last])

    def _shard_of(self, rank: int, span: Span) -> Span:
        return shard(span, rank, self.group.world.size)

    def _open_stages(self, n_elements: int) -> dict[int, HostBlock]:
        """This rank's own and those of the others, page-locked here so that the device copies by itself."""
        memory, pipes = HostMemory(), self.group.pipes
        own = memory.allocate(_FLOAT * n_elements, "the stage of the exchange")
        for pipe in pipes.values():
            own.send(pipe)
        theirs = {other: memory.receive(pipe, "its stage") for other, pipe in pipes.items()}
        stages = {self.group.world.rank: own, **theirs}
        for stage in stages.values():
            pagelock(stage)
        return stages

    def _copy_in(self, address: int, values: np.ndarray) -> None:
        if len(values):  # a small span leaves some ranks without a shard
            self._driver.memcpy_htod_async(address, values, self._stream)

    def _copy_out(self, values: np.ndarray, first: int) -> None:
        """Copies elements of the block, from `first` on, into a stage."""
        if len(values):
            self._driver.memcpy_dtoh_async(values, self._block.pointer + _FLOAT * first, self._stream)
