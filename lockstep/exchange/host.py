"""Averaging in shared host memory: every arena is mapped here, and read and written like one's own."""

import torch

from lockstep.exchange import Exchange, shard

CHUNK = (
    1 << 16
)  # elements; a chunk of each arena stays in the core's cache between being read and being written


class HostExchange(Exchange):
    """`arenas`: the flat tensor (n,) of every rank, in rank order, all of one dtype."""

    def __init__(self, arenas: list[torch.Tensor], rank: int) -> None:
        first, last = shard(len(arenas[0]), rank, len(arenas))
        pieces = [torch.split(arena[first:last], CHUNK) for arena in arenas]
        self._chunks = list(zip(*pieces, strict=True))

    def updated(self) -> None:
        """A processor has done what it was told when the next line is reached."""

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
