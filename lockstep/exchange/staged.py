"""Averaging on GPUs that can't reach each other: through page-locked host memory that all ranks share.

The same shards, kernel and bits as peer to peer. Each rank's *stage* is a block of host memory that all map:
first its arena, which the owners of the shards fetch from, then the mean of its own shard, which all fetch.

Nothing here needs CUDA IPC. A host waits for its own device before each meeting; then the meetings alone put
everything in order. The mean has a place of its own in the stage because others may still be fetching it when
the next step's arena is written: they are done with it before the next first meeting, and it is written after
that.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from typing import Any

import numpy as np

from lockstep.exchange import SHARD_ALIGNMENT, Exchange, shard
from lockstep.exchange.p2p import AverageKernel
from lockstep.memory.cuda import CudaBlock, CudaMemory
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.memory.pagelock import pagelock, unlock
from lockstep.peers import Peers

_FLOAT = 4  # bytes


class StagedExchange(Exchange):
    """block: this rank's arena of n_elements float32. stream: in which this rank computes."""

    name = "staged through host memory"

    def __init__(
        self, memory: CudaMemory, stream: Any, block: CudaBlock, n_elements: int, peers: Peers
    ) -> None:
        assert n_elements % SHARD_ALIGNMENT == 0
        self._driver, self._stream, self._peers, self._block = memory.driver, stream, peers, block
        self._n_elements = n_elements
        self._shards = [shard(n_elements, rank, peers.n_trainers) for rank in range(peers.n_trainers)]
        first, last = self._shards[peers.rank]
        self._stages = self._open_stages()
        # Every rank's arena as its owner last wrote it, and the mean of every rank's shard.
        self._arenas = {rank: stage.array(np.float32, (n_elements,)) for rank, stage in self._stages.items()}
        self._means = {rank: self._mean_in(stage, rank) for rank, stage in self._stages.items()}
        size = _FLOAT * max(last - first, 1)
        self._fetched = {rank: memory.allocate(size, "others' shards") for rank in peers.pipes}
        self._kernel = AverageKernel(memory, stream)

    def updated(self) -> None:
        for rank in self._peers.pipes:
            first, last = self._shards[rank]
            self._copy_out(self._arenas[self._peers.rank][first:last], first)
        self._stream.synchronize()

    def await_updates(self) -> None:
        """The host has waited for its device before it came to the meeting."""

    def average(self) -> None:
        first, last = self._shards[self._peers.rank]
        for rank, block in self._fetched.items():
            self._copy_in(block.pointer, self._arenas[rank][first:last])
        mine = {self._peers.rank: self._block.pointer + _FLOAT * first}
        addresses = {**mine, **{rank: block.pointer for rank, block in self._fetched.items()}}
        self._kernel.launch([addresses[rank] for rank in sorted(addresses)], 0, last - first)
        self._copy_out(self._means[self._peers.rank], first)
        self._stream.synchronize()

    def averaged(self) -> None:
        for rank in self._peers.pipes:
            self._copy_in(self._block.pointer + _FLOAT * self._shards[rank][0], self._means[rank])

    def close(self) -> None:
        self._stream.synchronize()
        self._peers.meet("nobody uses the stages of the others any more")
        for stage in self._stages.values():
            unlock(stage)
            stage.close()
        for block in self._fetched.values():
            block.close()

    def _open_stages(self) -> dict[int, HostBlock]:
        """This rank's own and those of the others, page-locked here so that the device copies by itself."""
        memory, rank = HostMemory(), self._peers.rank
        first, last = self._shards[rank]
        own = memory.allocate(_FLOAT * (self._n_elements + last - first), "the stage of the exchange")
        for pipe in self._peers.pipes.values():
            own.send(pipe)
        theirs = {other: memory.receive(pipe, "its stage") for other, pipe in self._peers.pipes.items()}
        stages = {rank: own, **theirs}
        for stage in stages.values():
            pagelock(stage)
        return stages

    def _mean_in(self, stage: HostBlock, rank: int) -> np.ndarray:
        first, last = self._shards[rank]
        return stage.array(np.float32, (last - first,), _FLOAT * self._n_elements)

    def _copy_in(self, address: int, values: np.ndarray) -> None:
        if len(values):  # a small arena leaves some ranks without a shard
            self._driver.memcpy_htod_async(address, values, self._stream)

    def _copy_out(self, values: np.ndarray, first: int) -> None:
        """Copies elements of the arena, from `first` on, into a stage."""
        if len(values):
            self._driver.memcpy_dtoh_async(values, self._block.pointer + _FLOAT * first, self._stream)
