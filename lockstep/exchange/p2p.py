"""Collectives on GPUs: a kernel reads and writes the peers' blocks through pointers that CUDA IPC has opened.

No process waits for a device. Each rank has two interprocess events in its compute stream: *ready*, recorded
before the first barrier, and *done*, recorded after its part of the work. Every rank's stream waits for the
events of all others. A wait refers to the last record that was issued before it, so the barriers order the
calls: records before a barrier, waits after it.

The work is done in the compute stream, since the next work there needs the result. Reductions of marked
buckets are the exception. Each mark has one more event; a second stream waits for it in all ranks and
reduces, while the compute stream continues behind the mark.
"""

from typing import TYPE_CHECKING, Any

from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange import Op, Span
from lockstep.exchange.direct import DirectTransport
from lockstep.exchange.transport import Collective, MarkedReduction
from lockstep.exchange.tree import PartialSums, sums_behind
from lockstep.kernels.fold import MOST_SOURCES, ReduceKernel
from lockstep.memory import Block
from lockstep.memory.cuda import NON_BLOCKING, CudaBlock, CudaMemory

if TYPE_CHECKING:
    import torch

_FLOAT_BYTES = 4


def check_sources(partial_sums: PartialSums) -> None:
    """Raise UserError if a kernel cannot add up so many partial sums."""
    n_sums = len(partial_sums.sources)
    if n_sums > MOST_SOURCES:
        raise UserError(
            f"shares: GPUs add up {MOST_SOURCES} partial sums at most, and these shares have {n_sums}: set "
            "shares: equal, or use fewer devices"
        )


class PeerTransport(DirectTransport, MarkedReduction):
    """A transport among GPUs that reach each other's memory.

    Args:
        memory: Of this rank's device.
        stream: In which this rank computes.
        block: This rank's n_elements float32.
        n_elements: The size of every block.
        group: The ranks.
    """

    name = "peer to peer"

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, group: Group
    ) -> None:
        super().__init__(group, n_elements)
        self._memory, self._stream = memory, stream
        self._kernel = ReduceKernel(memory, stream)
        self._opened = self._open(block)
        blocks = {**self._opened, group.world.rank: block}
        self._addresses = [blocks[rank].pointer for rank in sorted(blocks)]
        (self._ready, self._done), theirs = self._open_events(2)
        self._peers_ready, self._peers_done = theirs
        self._peers_marks: list[list[Any]] = []

    def another(self, block: Block, flat: "torch.Tensor") -> "PeerTransport":
        assert isinstance(block, CudaBlock)
        return PeerTransport(self._memory, self._stream, block, len(flat), self.group)

    def prepare(self, collective: Collective) -> None:
        self._ready.record(self._stream)

    def enter(self) -> None:
        for event in self._peers_ready:
            self._stream.wait_for_event(event)

    def work(self, collective: Collective) -> None:
        sources, targets, span = self.parts(collective)
        if not sources == targets == sources[:1]:  # else no other block is involved
            self._reduce(sources, targets, span, collective.op)
        self.record_done()

    def use_partial_sums(self, partial_sums: PartialSums) -> None:
        check_sources(partial_sums)
        super().use_partial_sums(partial_sums)

    def reduce_shard(self, span: Span, op: Op) -> None:
        if self.group.pipes:
            self._reduce(list(range(self.group.world.size)), [self.group.world.rank], span, op)

    def _reduce(self, sources: list[int], targets: list[int], span: Span, op: Op) -> None:
        sums = self.partial_sums
        if op != "pairwise" or sums == PartialSums.of_ranks(self.group.world.size):
            self._kernel.launch(self._of(sources), self._of(targets), span, op)
            return
        addresses = [self._addresses[rank] + _FLOAT_BYTES * first for rank, first in sums.sources]
        self._kernel.launch_tree(addresses, self._of(targets), span, sums_behind(sums.shape))

    def scatter_shard(self, span: Span) -> None:
        self._kernel.launch(self._of([self.group.world.rank]), self._of(list(self.group.pipes)), span, "sum")

    def record_done(self) -> None:
        self._done.record(self._stream)

    def complete(self, collective: Collective) -> None:
        for event in self._peers_done:
            self._stream.wait_for_event(event)

    def open_marks(self, number: int) -> None:
        self._marks, self._peers_marks = self._open_events(number)
        self._marked_stream = self._memory.driver.Stream(NON_BLOCKING)
        (self._joined,) = self._memory.events(1)
        self._marked_kernel = ReduceKernel(self._memory, self._marked_stream)

    def mark(self, number: int) -> None:
        self._marks[number].record(self._stream)

    def reduce_marked(self, number: int, span: Span, op: Op) -> None:
        for event in [self._marks[number], *self._peers_marks[number]]:
            self._marked_stream.wait_for_event(event)
        rank = self.group.world.rank
        self._marked_kernel.launch(self._addresses, [self._addresses[rank]], span, op)

    def join_marked(self) -> None:
        self._joined.record(self._marked_stream)
        self._stream.wait_for_event(self._joined)

    def close(self) -> None:
        self._stream.synchronize()
        self.group.barrier("no rank uses the blocks of the others any more")
        self._peers_ready = self._peers_done = self._peers_marks = []  # before their owners destroy them
        for block in self._opened.values():
            block.close()
        self.group.barrier("no rank has the blocks of the others open any more")

    def _of(self, ranks: list[int]) -> list[int]:
        return [self._addresses[rank] for rank in ranks]

    def _open(self, block: CudaBlock) -> dict[int, CudaBlock]:
        for pipe in self.group.pipes.values():
            block.send(pipe)
        opened = {rank: self._memory.receive(pipe, "its block") for rank, pipe in self.group.pipes.items()}
        assert all(theirs.n_bytes == block.n_bytes for theirs in opened.values()), "blocks differ in size"
        return opened

    def _open_events(self, number: int) -> tuple[list[Any], list[list[Any]]]:
        """Return new events, and for each of them the corresponding events of the others."""
        ours = (self._memory.shared_events if self.group.pipes else self._memory.events)(number)
        for pipe in self.group.pipes.values():
            self._memory.send_events(pipe, ours)
        theirs = [self._memory.receive_events(pipe, "its events") for pipe in self.group.pipes.values()]
        return ours, [[events[place] for events in theirs] for place in range(number)]


class SwapTransport(PeerTransport):
    """The reference: as in theano_alexnet, every rank copies all other blocks, then averages its own.

    It can average whole blocks only. It needs memory for the copies, moves P / 2 times as many bytes as peer
    to peer, and gives the same bits.
    """

    name = "swap"

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, group: Group
    ) -> None:
        super().__init__(memory, stream, block, n_elements, group)
        self._copies = {
            rank: memory.allocate(_FLOAT_BYTES * n_elements, f"a copy of trainer {rank}'s arena")
            for rank in group.pipes
        }
        self._own = block.pointer
        blocks = {**self._copies, group.world.rank: block}
        self._sources = [blocks[rank].pointer for rank in sorted(blocks)]

    def prepare(self, collective: Collective) -> None:
        whole = Collective("all_reduce", (0, self.n_elements), "mean")
        assert collective == whole, f"swap averages whole blocks only, and was asked for {collective}"
        super().prepare(collective)

    def work(self, collective: Collective) -> None:
        # IPC has mapped the other's memory into this context. PyCUDA crashes if the contexts are omitted.
        contexts = {"dest_context": self._memory.context, "src_context": self._memory.context}
        for rank, copy in self._copies.items():
            theirs, n_bytes = self._opened[rank].pointer, _FLOAT_BYTES * self.n_elements
            self._memory.driver.memcpy_peer_async(
                copy.pointer, theirs, n_bytes, stream=self._stream, **contexts
            )
        self._done.record(self._stream)  # only copied so far: the others may overwrite theirs after this

    def complete(self, collective: Collective) -> None:
        super().complete(collective)
        if self._copies:
            self._kernel.launch(self._sources, [self._own], collective.span, "mean")

    def close(self) -> None:
        super().close()
        for copy in self._copies.values():
            copy.close()
