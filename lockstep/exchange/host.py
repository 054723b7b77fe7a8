"""Averaging in shared host memory: every arena is mapped here, and read and written like one's own."""

import torch

from lockstep.exchange import Exchange, shard
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.peers import Peers

# elements; a chunk of each arena stays in the core's cache between being read and being written
CHUNK = 1 << 16


class HostExchange(Exchange):
    """`arenas`: the flat tensor (n,) of every rank, in rank order, all of one dtype."""

    name = "shared host memory"

    def __init__(self, arenas: list[torch.Tensor], rank: int) -> None:
        first, last = shard(len(arenas[0]), rank, len(arenas))
        pieces = [torch.split(arena[first:last], CHUNK) for arena in arenas]
        self._chunks = list(zip(*pieces, strict=True))

    @classmethod
    def open(cls, block: HostBlock, arena: torch.Tensor, peers: Peers) -> "HostExchange":
        """Shares this rank's arena, which lies in `block`, and opens those of the others."""
        arenas = {peers.rank: arena}
        for pipe in peers.pipes.values():
            block.send(pipe)
        for rank, pipe in peers.pipes.items():
            theirs = HostMemory().receive(pipe, "its arena")
            arenas[rank] = theirs.tensor(arena.dtype, tuple(arena.shape))
        return cls([arenas[rank] for rank in sorted(arenas)], peers.rank)

    def updated(self) -> None:
        """A processor has done what it was told when the next line is reached."""

    def await_updates(self) -> None:
        """As above."""

    def averaged(self) -> None:
        """As above."""

    def average(self) -> None:
        for mean, *others in self._chunks:  # rank 0's chunk takes the sum, in rank order
            if others:
                for other in others:
                    mean.add_(other)
                mean.div_(len(others) + 1)
                for other in others:
                    other.copy_(mean)

    def close(self) -> None:
        self._chunks = []
