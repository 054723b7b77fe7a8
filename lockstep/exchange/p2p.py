"""Averaging on GPUs: a kernel reads and writes the peers' arenas through pointers that CUDA IPC has opened.

No host waits for a device. Each rank has two interprocess events, recorded in its compute stream: *updated*
after its update, *averaged* after its part of the averaging. Every rank's stream waits for every other's. A
wait refers to the last record that was issued before it, so the trainers' meetings put the calls in order:
records before a meeting, waits after it.

All is done in the compute stream itself. Another stream would gain nothing: the next forward pass needs the
mean.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from typing import Any

import numpy as np

from lockstep import kernels
from lockstep.exchange import SHARD_ALIGNMENT, Exchange, shard
from lockstep.memory.cuda import CudaBlock, CudaMemory
from lockstep.peers import Peers

MOST_RANKS = 16  # as in kernels/average.cu
_THREADS = 256
_FLOATS = 4  # that one thread takes


class AverageKernel:
    """Averages elements of up to 16 float32 arrays in device memory, and writes the mean into all of them."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        driver = memory.driver
        self._stream = stream
        self._kernel = kernels.load(driver, "average").get_function("average")
        processors = driver.Context.get_device().get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        self._most_blocks = 8 * processors  # fills the device; each thread goes round until all is done

    def launch(self, addresses: list[int], first: int, last: int) -> None:
        """addresses: of element 0 of each array, in rank order; [first, last): elements, multiples of 4."""
        assert len(addresses) <= MOST_RANKS and first % _FLOATS == last % _FLOATS == 0
        first, last = first // _FLOATS, last // _FLOATS
        pointers = np.zeros(MOST_RANKS, np.uint64)
        pointers[: len(addresses)] = addresses
        self._kernel(
            pointers,
            np.int32(len(addresses)),
            np.uint64(first),
            np.uint64(last),
            block=(_THREADS, 1, 1),
            grid=(max(1, min(-(-(last - first) // _THREADS), self._most_blocks)), 1),
            stream=self._stream,
        )


class PeerExchange(Exchange):
    """block: this rank's arena of n_elements float32. stream: in which this rank computes."""

    name = "peer to peer"

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, peers: Peers
    ) -> None:
        assert n_elements % SHARD_ALIGNMENT == 0
        self._memory, self._stream, self._peers, self._n_elements = memory, stream, peers, n_elements
        self._kernel = AverageKernel(memory, stream)
        self._opened = self._open(block)
        blocks = {**self._opened, peers.rank: block}
        self._arenas = [blocks[rank].pointer for rank in sorted(blocks)]
        self._updated, self._averaged = memory.events(2)
        self._peers_updated, self._peers_averaged = self._open_events()

    def updated(self) -> None:
        self._updated.record(self._stream)

    def await_updates(self) -> None:
        for event in self._peers_updated:
            self._stream.wait_for_event(event)

    def average(self) -> None:
        if self._opened:
            self._kernel.launch(self._arenas, *shard(self._n_elements, self._peers.rank, len(self._arenas)))
        self._averaged.record(self._stream)

    def averaged(self) -> None:
        for event in self._peers_averaged:
            self._stream.wait_for_event(event)

    def close(self) -> None:
        self._stream.synchronize()
        self._peers.meet("nobody uses the arenas of the others any more")
        for block in self._opened.values():
            block.close()
        self._peers.meet("nobody has the arenas of the others open any more")

    def _open(self, block: CudaBlock) -> dict[int, CudaBlock]:
        for pipe in self._peers.pipes.values():
            block.send(pipe)
        opened = {rank: self._memory.receive(pipe, "its arena") for rank, pipe in self._peers.pipes.items()}
        assert all(theirs.n_bytes == block.n_bytes for theirs in opened.values()), "arenas differ in size"
        return opened

    def _open_events(self) -> tuple[list[Any], list[Any]]:
        for pipe in self._peers.pipes.values():
            self._memory.send_events(pipe, [self._updated, self._averaged])
        theirs = [self._memory.receive_events(pipe, "its events") for pipe in self._peers.pipes.values()]
        return [updated for updated, _ in theirs], [averaged for _, averaged in theirs]


class SwapExchange(PeerExchange):
    """The reference: every rank copies every other's whole arena, then averages its own.

    As theano_alexnet did it. It needs memory for the copies, moves P / 2 times as much, gives the same bits.
    """

    name = "swap"

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, peers: Peers
    ) -> None:
        super().__init__(memory, stream, block, n_elements, peers)
        self._copies = {
            rank: memory.allocate(4 * n_elements, f"a copy of trainer {rank}'s arena") for rank in peers.pipes
        }
        blocks = {**self._copies, peers.rank: block}
        self._mine = [blocks[rank].pointer for rank in sorted(blocks)]

    def average(self) -> None:
        # IPC has mapped the other's memory into this context; PyCUDA crashes where none is named.
        contexts = {"dest_context": self._memory.context, "src_context": self._memory.context}
        for rank, copy in self._copies.items():
            theirs, n_bytes = self._opened[rank].pointer, 4 * self._n_elements
            self._memory.driver.memcpy_peer_async(
                copy.pointer, theirs, n_bytes, stream=self._stream, **contexts
            )
        self._averaged.record(self._stream)  # so far only copied: then the others may overwrite theirs

    def averaged(self) -> None:
        super().averaged()
        if self._copies:
            self._kernel.launch(self._mine, 0, self._n_elements)

    def close(self) -> None:
        super().close()
        for copy in self._copies.values():
            copy.close()
