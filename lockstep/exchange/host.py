"""Averaging in shared host memory: every arena is mapped here, and read and written like one's own."""

import torch

from lockstep.exchange import Exchange, shard

CHUNK = (
    1 << 15
)  # elements; a chunk of each arena stays in the core's cache between being read and being written


class HostExchange(Exchange):
    """`arenas`: the flat tensor (n,) of every rank, in rank order, all of one dtype."""

    def __init__(self, arenas: list[torch.Tensor], rank: int) -> None:
        first, last = shard(len(arenas[0]), rank, len(arenas))
        self._shards = [arena[first:last] for arena in arenas]
        self._mean = torch.empty(min(CHUNK, last - first), dtype=arenas[0].dtype)

    def average(self) -> None:
        if len(self._shards) == 1:
            return
        for parts in zip(*(torch.split(part, CHUNK) for part in self._shards), strict=True):
            mean = self._mean[: len(parts[0])]
            torch.add(parts[0], parts[1], out=mean)
            for part in parts[2:]:
                mean.add_(part)
            mean.div_(len(parts))
            for part in parts:
                part.copy_(mean)
