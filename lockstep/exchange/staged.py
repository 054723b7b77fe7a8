"""Collectives of devices that can't reach each other: through host memory that all ranks share.

Shards and order of sums are those of the other transports. Each rank's *stage* is host memory that all ranks
map. It has room for every element of the rank's block, from which the others fetch, and as much room for
results. `StagedTransport` is for a rank on a GPU, `HostStagedTransport` for one on a CPU beside GPUs.

Nothing here needs CUDA IPC. A process waits for its own device before each barrier, so the barriers order
all work. Results have their own half of the stage because other ranks may still fetch them while the next
collective's inputs are written. The ranks have fetched them before that collective's first barrier, and the
next results are written after it.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.comm.group import Group
from lockstep.exchange import ALIGNMENT, Op, Span, shard
from lockstep.exchange.direct import DirectTransport
from lockstep.exchange.p2p import check_sources
from lockstep.exchange.reduction import chunks, reduce_chunk
from lockstep.exchange.transport import Collective
from lockstep.exchange.tree import PartialSums, sums_behind
from lockstep.kernels.fold import ReduceKernel
from lockstep.memory import Block
from lockstep.memory.cuda import CudaBlock, CudaMemory
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.memory.pagelock import pagelock, unlock

if TYPE_CHECKING:
    import torch

_FLOAT = 4  # bytes
_REDUCING = ("all_reduce", "reduce_scatter")


class StagedCollectives(DirectTransport):
    """The collectives through stages, without the copies and sums of a kind of device.

    Args:
        group: The ranks.
        n_elements: The size of every block, in float32.
    """

    name = "staged through host memory"

    def __init__(self, group: Group, n_elements: int) -> None:
        super().__init__(group, n_elements)
        self._stages = self._open_stages(2 * n_elements)
        self._inputs = {rank: stage.array(np.float32, (n_elements,)) for rank, stage in self._stages.items()}
        self._results = {
            rank: stage.array(np.float32, (n_elements,), _FLOAT * n_elements)
            for rank, stage in self._stages.items()
        }

    @abstractmethod
    def reduce_shard(self, span: Span, op: Op) -> None:
        """Reduce a span of all ranks' inputs into this rank's block."""

    @abstractmethod
    def _copy_in(self, first: int, values: np.ndarray) -> None:
        """Copy values of a stage into this rank's block, from element `first` on. There may be none."""

    @abstractmethod
    def _copy_out(self, values: np.ndarray, first: int) -> None:
        """Copy elements of this rank's block, from `first` on, into a stage. There may be none."""

    def scatter_shard(self, span: Span) -> None:
        self._copy_out(self._results[self.group.world.rank][slice(*span)], span[0])

    def prepare(self, collective: Collective) -> None:
        for first, last in self._read_by_others(collective):
            self._copy_out(self._inputs[self.group.world.rank][first:last], first)
        self.record_done()

    def work(self, collective: Collective) -> None:
        if collective.kind in _REDUCING:
            self.reduce_shard(self.shard(collective.span), collective.op)
            if collective.kind == "all_reduce":
                self.scatter_shard(self.shard(collective.span))
        elif collective.kind == "all_gather":
            for rank in self.group.pipes:
                self._fetch(rank, self._shard_of(rank, collective.span))
        elif self.group.world.rank != collective.source:
            self._fetch(collective.source, collective.span)
        self.record_done()

    def complete(self, collective: Collective) -> None:
        if collective.kind == "all_reduce":
            for rank in self.group.pipes:
                first, last = self._shard_of(rank, collective.span)
                self._copy_in(first, self._results[rank][first:last])

    def _read_by_others(self, collective: Collective) -> list[Span]:
        """Return the spans of this rank's block that other ranks read."""
        if collective.kind in _REDUCING:
            shards = [self._shard_of(rank, collective.span) for rank in self.group.pipes]
            starts = [start for rank, start in self._sources(collective.op) if rank == self.group.world.rank]
            return [(start + first, start + last) for start in starts for first, last in shards]
        if collective.kind == "all_gather":
            return [self.shard(collective.span)]
        return [collective.span] if self.group.world.rank == collective.source else []

    def _sources(self, op: Op) -> tuple[tuple[int, int], ...]:
        """Return the rank and the first element of each input of a reduction, in order."""
        if op == "pairwise":
            return self.partial_sums.sources
        return tuple((rank, 0) for rank in range(self.group.world.size))

    def _fetch(self, rank: int, span: Span) -> None:
        self._copy_in(span[0], self._inputs[rank][slice(*span)])

    def _shard_of(self, rank: int, span: Span) -> Span:
        return shard(span, rank, self.group.world.size)

    def _open_stages(self, n_elements: int) -> dict[int, HostBlock]:
        """Open all ranks' stages."""
        memory, pipes = HostMemory(), self.group.pipes
        own = memory.allocate(_FLOAT * n_elements, "the stage of the exchange")
        for pipe in pipes.values():
            own.send(pipe)
        theirs = {other: memory.receive(pipe, "its stage") for other, pipe in pipes.items()}
        return {self.group.world.rank: own, **theirs}

    def close(self) -> None:
        self.record_done()
        self.group.barrier("no rank uses the stages of the others any more")
        for stage in self._stages.values():
            stage.close()


class StagedTransport(StagedCollectives):
    """A transport of a GPU's rank. Its device copies from and to page-locked stages, and reduces.

    Args:
        memory: Of this rank's device.
        stream: In which this rank computes.
        block: This rank's n_elements float32.
        n_elements: The size of every block.
        group: The ranks.
    """

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, group: Group
    ) -> None:
        super().__init__(group, n_elements)
        self._memory, self._driver, self._stream, self._block = memory, memory.driver, stream, block
        for stage in self._stages.values():
            pagelock(stage)
        self._most = n_elements // group.world.size + 2 * ALIGNMENT  # elements in the shard of any span
        self._fetched: list[CudaBlock] = []
        self.use_partial_sums(self.partial_sums)
        self._kernel = ReduceKernel(memory, stream)

    def another(self, block: Block, flat: "torch.Tensor") -> "StagedTransport":
        assert isinstance(block, CudaBlock)
        return StagedTransport(self._memory, self._stream, block, len(flat), self.group)

    def use_partial_sums(self, partial_sums: PartialSums) -> None:
        check_sources(partial_sums)
        super().use_partial_sums(partial_sums)
        own = self.group.world.rank
        n_fetched = max(sum(rank != own for rank, _ in partial_sums.sources), len(self.group.pipes))
        while len(self._fetched) < n_fetched:
            self._fetched.append(self._memory.allocate(_FLOAT * self._most, "others' shards"))

    def record_done(self) -> None:
        self._stream.synchronize()

    def reduce_shard(self, span: Span, op: Op) -> None:
        (first, last), addresses, blocks = span, [], iter(self._fetched)
        for rank, start in self._sources(op):
            if rank == self.group.world.rank:
                addresses.append(self._address(start + first))
            else:
                addresses.append(next(blocks).pointer)
                self._copy_to(addresses[-1], self._inputs[rank][start + first : start + last])
        mine = [self._address(first)]
        if op == "pairwise":
            program = sums_behind(self.partial_sums.shape)
            self._kernel.launch_tree(addresses, mine, (0, last - first), program)
        else:
            self._kernel.launch(addresses, mine, (0, last - first), op)

    def close(self) -> None:
        self.record_done()
        for stage in self._stages.values():
            unlock(stage)
        super().close()
        for block in self._fetched:
            block.close()

    def _address(self, element: int) -> int:
        return self._block.pointer + _FLOAT * element

    def _copy_in(self, first: int, values: np.ndarray) -> None:
        self._copy_to(self._address(first), values)

    def _copy_to(self, address: int, values: np.ndarray) -> None:
        if len(values):  # a small span leaves some ranks without a shard
            self._driver.memcpy_htod_async(address, values, self._stream)

    def _copy_out(self, values: np.ndarray, first: int) -> None:
        if len(values):
            self._driver.memcpy_dtoh_async(values, self._address(first), self._stream)


class HostStagedTransport(StagedCollectives):
    """A transport of a CPU's rank beside GPUs' ranks. It reduces other ranks' inputs from their stages.

    Args:
        block: This rank's n_elements float32.
        n_elements: The size of every block.
        group: The ranks.
    """

    def __init__(self, block: HostBlock, n_elements: int, group: Group) -> None:
        super().__init__(group, n_elements)
        self._values = block.array(np.float32, (n_elements,))

    def another(self, block: Block, flat: "torch.Tensor") -> "HostStagedTransport":
        assert isinstance(block, HostBlock)
        return HostStagedTransport(block, len(flat), self.group)

    def reduce_shard(self, span: Span, op: Op) -> None:
        (first, last), own = span, self.group.world.rank
        blocks, sources = {**self._inputs, own: self._values}, self._sources(op)
        pieces = [blocks[rank][start + first : start + last] for rank, start in sources]
        target = sources.index((own, 0))  # it must be the same array object as the source
        for chunk in chunks(pieces):
            reduce_chunk(chunk, [chunk[target]], op, self.partial_sums.shape)

    def _copy_in(self, first: int, values: np.ndarray) -> None:
        self._values[first : first + len(values)] = values

    def _copy_out(self, values: np.ndarray, first: int) -> None:
        values[:] = self._values[first : first + len(values)]
