"""Collectives on GPUs: a kernel reads and writes the peers' blocks through pointers that CUDA IPC has opened.

No host waits for a device. Each rank has two interprocess events, recorded in its compute stream: *offered*
before the first barrier, *worked* behind its part of the work. Every rank's stream waits for every other's. A
wait refers to the last record that was issued before it, so the barriers put the calls in order: records
before a barrier, waits after it.

All is done in the compute stream itself, since what comes next needs the result; but for folds of what was
marked. For each mark there is one more event, and a stream of its own waits for it in all ranks and folds,
while the compute stream goes on with what came after the mark.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import kernels
from lockstep.comm.group import Group
from lockstep.exchange import OPS, Op, Span
from lockstep.exchange.direct import DirectTransport
from lockstep.exchange.transport import Collective
from lockstep.memory import Block
from lockstep.memory.cuda import NON_BLOCKING, CudaBlock, CudaMemory

if TYPE_CHECKING:
    import torch

MOST_RANKS = 16  # as in kernels/fold.cu
_THREADS = 256
_FLOATS = 4  # that one thread takes
_FLOAT_BYTES = 4


class FoldKernel:
    """Folds a span of up to 16 float32 arrays in device memory, and writes the result into up to 16."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        driver = memory.driver
        self._stream = stream
        module = kernels.load(driver, "fold")
        self._kernels = {op: module.get_function(f"fold_{op}") for op in OPS}
        processors = driver.Context.get_device().get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        self._most_blocks = 8 * processors  # fills the device; each thread goes round until all is done

    def launch(self, sources: list[int], targets: list[int], span: Span, op: Op) -> None:
        """sources, targets: addresses of element 0 of each array; span: elements, from a multiple of 4 on."""
        first, last = span
        assert first % _FLOATS == 0
        if first == last or not targets:
            return
        self._kernels[op](
            _packed(sources),  # both arrays first: PyCUDA does not align them
            _packed(targets),
            np.int32(len(sources)),
            np.int32(len(targets)),
            np.uint64(first),
            np.uint64(last),
            block=(_THREADS, 1, 1),
            grid=(max(1, min(-(-(last - first) // (_FLOATS * _THREADS)), self._most_blocks)), 1),
            stream=self._stream,
        )


def _packed(addresses: list[int]) -> np.ndarray:
    assert len(addresses) <= MOST_RANKS
    pointers = np.zeros(MOST_RANKS, np.uint64)
    pointers[: len(addresses)] = addresses
    return pointers


class PeerTransport(DirectTransport):
    """block: this rank's n_elements float32. stream: in which this rank computes."""

    name = "peer to peer"
    overlaps = True

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, group: Group
    ) -> None:
        super().__init__(group, n_elements)
        self._memory, self._stream = memory, stream
        self._kernel = FoldKernel(memory, stream)
        self._opened = self._open(block)
        blocks = {**self._opened, group.world.rank: block}
        self._addresses = [blocks[rank].pointer for rank in sorted(blocks)]
        (self._offered, self._worked), theirs = self._open_events(2)
        self._peers_offered, self._peers_worked = theirs
        self._peers_marks: list[list[Any]] = []

    def another(self, block: Block, flat: "torch.Tensor") -> "PeerTransport":
        assert isinstance(block, CudaBlock)
        return PeerTransport(self._memory, self._stream, block, len(flat), self.group)

    def offer(self, collective: Collective) -> None:
        self._offered.record(self._stream)

    def accept(self) -> None:
        for event in self._peers_offered:
            self._stream.wait_for_event(event)

    def work(self, collective: Collective) -> None:
        sources, targets, span = self.parts(collective)
        if not sources == targets == sources[:1]:  # else nothing comes from elsewhere
            self._kernel.launch(self._of(sources), self._of(targets), span, collective.op)
        self.worked()

    def fold(self, span: Span, op: Op) -> None:
        if self.group.pipes:
            rank = self.group.world.rank
            self._kernel.launch(self._addresses, [self._addresses[rank]], span, op)

    def spread(self, span: Span) -> None:
        self._kernel.launch(self._of([self.group.world.rank]), self._of(list(self.group.pipes)), span, "sum")

    def worked(self) -> None:
        self._worked.record(self._stream)

    def settle(self, collective: Collective) -> None:
        for event in self._peers_worked:
            self._stream.wait_for_event(event)

    def open_marks(self, number: int) -> None:
        self._marks, self._peers_marks = self._open_events(number)
        self._beside, (self._joined,) = self._memory.driver.Stream(NON_BLOCKING), self._memory.events(1)
        self._kernel_beside = FoldKernel(self._memory, self._beside)

    def mark(self, number: int) -> None:
        self._marks[number].record(self._stream)

    def fold_marked(self, number: int, span: Span, op: Op) -> None:
        for event in [self._marks[number], *self._peers_marks[number]]:
            self._beside.wait_for_event(event)
        rank = self.group.world.rank
        self._kernel_beside.launch(self._addresses, [self._addresses[rank]], span, op)

    def join(self) -> None:
        self._joined.record(self._beside)
        self._stream.wait_for_event(self._joined)

    def close(self) -> None:
        self._stream.synchronize()
        self.group.barrier("nobody uses the blocks of the others any more")
        self._peers_offered = self._peers_worked = self._peers_marks = []  # before their owners destroy them
        for block in self._opened.values():
            block.close()
        self.group.barrier("nobody has the blocks of the others open any more")

    def _of(self, ranks: list[int]) -> list[int]:
        return [self._addresses[rank] for rank in ranks]

    def _open(self, block: CudaBlock) -> dict[int, CudaBlock]:
        for pipe in self.group.pipes.values():
            block.send(pipe)
        opened = {rank: self._memory.receive(pipe, "its block") for rank, pipe in self.group.pipes.items()}
        assert all(theirs.n_bytes == block.n_bytes for theirs in opened.values()), "blocks differ in size"
        return opened

    def _open_events(self, number: int) -> tuple[list[Any], list[list[Any]]]:
        """New events, and for each of them all those of the others."""
        ours = (self._memory.shared_events if self.group.pipes else self._memory.events)(number)
        for pipe in self.group.pipes.values():
            self._memory.send_events(pipe, ours)
        theirs = [self._memory.receive_events(pipe, "its events") for pipe in self.group.pipes.values()]
        return ours, [[events[place] for events in theirs] for place in range(number)]


class SwapTransport(PeerTransport):
    """The reference: every rank copies every other's whole block, then averages its own.

    As theano_alexnet did it; it can do nothing else. It needs memory for the copies, moves P / 2 times as
    much, gives the same bits.
    """

    name = "swap"
    overlaps = False

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

    def offer(self, collective: Collective) -> None:
        whole = Collective("all_reduce", (0, self.n_elements), "mean")
        assert collective == whole, f"swap averages whole blocks only, and was asked for {collective}"
        super().offer(collective)

    def work(self, collective: Collective) -> None:
        # IPC has mapped the other's memory into this context; PyCUDA crashes where none is named.
        contexts = {"dest_context": self._memory.context, "src_context": self._memory.context}
        for rank, copy in self._copies.items():
            theirs, n_bytes = self._opened[rank].pointer, _FLOAT_BYTES * self.n_elements
            self._memory.driver.memcpy_peer_async(
                copy.pointer, theirs, n_bytes, stream=self._stream, **contexts
            )
        self._worked.record(self._stream)  # so far only copied: then the others may overwrite theirs

    def settle(self, collective: Collective) -> None:
        super().settle(collective)
        if self._copies:
            self._kernel.launch(self._sources, [self._own], collective.span, "mean")

    def close(self) -> None:
        super().close()
        for copy in self._copies.values():
            copy.close()
