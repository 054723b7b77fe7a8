"""Three ways to a sum over hosts: all-reduce, along a tree with bits that are always the same, and rounded.

Each leaves equal bits on all hosts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from lockstep.hosts.riders import N_NUMBERS, Riders, Row
from lockstep.hosts.wire import BLOCK, Wire

Connected = Any  # torch's ProcessGroupGloo or ProcessGroupNCCL, whose stubs share no base with these methods
Wait = Callable[..., None]  # takes works of torch.distributed, and ends when they are done


class Way(ABC):
    """group: a trainer of each host. wait: for works; raises where a host is gone or late."""

    def __init__(self, group: Connected, wait: Wait, host: int, n_hosts: int) -> None:
        self.group, self.wait, self.host, self.n_hosts = group, wait, host, n_hosts

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> int:
        """The tensor, (n,), becomes the sum of all hosts'. Returns how many bytes this host has sent."""

    @abstractmethod
    def sum_with(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        """The same, with a row of numbers. Returns also the rows of all hosts, by host."""


class _Exact(Way):
    """Rows go in front of the numbers, in a copy of both."""

    def sum_with(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        riders = Riders(self.host, self.n_hosts)
        both = torch.cat([riders.encode(row, tensor), tensor])
        n_bytes = self.sum(both)
        tensor.copy_(both[riders.n_elements :])
        return riders.decode(both[: riders.n_elements]), n_bytes


class AllReduce(_Exact):
    """The library's own."""

    def sum(self, tensor: torch.Tensor) -> int:
        self.wait(self.group.allreduce([tensor]))
        return 2 * tensor.nbytes * (self.n_hosts - 1) // self.n_hosts


class Tree(_Exact):
    """Sums of neighbours, then of neighbouring sums, and so on, as `parts` adds inside a host.

    n_hosts: a power of two. Hosts halve what they keep while they add, with ever more distant partners, and
    gather it on the way back (Rabenseifner 2004), so that every number crosses a link as often as in a ring.
    """

    def sum(self, tensor: torch.Tensor) -> int:
        kept, n_bytes = tensor, 0
        halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for distance in self._distances():
            lower, upper = kept.tensor_split(2)
            kept, given = (upper, lower) if self.host & distance else (lower, upper)
            halves.append((kept, given))
            theirs = torch.empty_like(kept)
            n_bytes += self._swap(self.host ^ distance, given, theirs)
            kept.add_(theirs)
        for distance, (kept, given) in zip(reversed(self._distances()), reversed(halves), strict=True):
            n_bytes += self._swap(self.host ^ distance, kept, given)
        return n_bytes

    def _distances(self) -> list[int]:
        return [1 << level for level in range(self.n_hosts.bit_length() - 1)]

    def _swap(self, partner: int, ours: torch.Tensor, theirs: torch.Tensor) -> int:
        """Sends and receives at once; neither where there is nothing."""
        works: list[Any] = []
        if len(theirs):
            works.append(self.group.recv([theirs], partner, 0))
        if len(ours):
            works.append(self.group.send([ours], partner, 0))
        self.wait(*works)
        return ours.nbytes


class Rounded(Way):
    """Each host adds up one part of the numbers, as they come over the wire, and sends the sum to all.

    generator: for a wire that rounds at random; seeded by `begin`.
    """

    def __init__(
        self, group: Connected, wait: Wait, host: int, n_hosts: int, wire: Wire, device: torch.device
    ) -> None:
        super().__init__(group, wait, host, n_hosts)
        self._wire, self.generator = wire, torch.Generator(device)

    def sum(self, tensor: torch.Tensor) -> int:
        return self.sum_with(tensor, [0.0] * N_NUMBERS)[1]

    def sum_with(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        n_each = -(-len(tensor) // (self.n_hosts * BLOCK)) * BLOCK  # numbers of a part
        n_bytes = self._wire.n_bytes(n_each)
        rider = torch.tensor(row, dtype=torch.float64, device=tensor.device).view(torch.uint8)
        ours = torch.empty((self.n_hosts, n_bytes + len(rider)), dtype=torch.uint8, device=tensor.device)
        parts = [tensor[first : first + n_each] for first in range(0, len(tensor), n_each)]
        for part, packed in zip(parts, ours, strict=False):
            self._wire.pack(_filled_up(part, n_each), packed[:n_bytes], self.generator)
        ours[len(parts) :] = 0  # of hosts for which nothing is left
        ours[:, n_bytes:] = rider
        theirs = torch.empty_like(ours)
        theirs[self.host] = ours[self.host]
        self._swap(list(ours), list(theirs))
        sums = self._gather(self._added([each[:n_bytes] for each in theirs]), n_bytes)
        for part, packed in zip(parts, sums, strict=False):
            part.copy_(self._wire.unpack(packed)[: len(part)])
        rows = [each[n_bytes:].clone().view(torch.float64).tolist() for each in theirs]
        return rows, (self.n_hosts - 1) * (ours[0].nbytes + n_bytes)

    def _added(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = self._wire.unpack(parts[0]).float()
        for part in parts[1:]:
            total += self._wire.unpack(part)
        return total

    def _gather(self, total: torch.Tensor, n_bytes: int) -> list[torch.Tensor]:
        """Every host's sum, packed."""
        ours = torch.empty(n_bytes, dtype=torch.uint8, device=total.device)
        self._wire.pack(total, ours, self.generator)
        sums = [ours if host == self.host else torch.empty_like(ours) for host in range(self.n_hosts)]
        self._swap([ours] * self.n_hosts, sums)
        return sums

    def _swap(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        """Sends each other host its own, and receives from each.

        One by one with gloo, on CPUs: over a limited link its collectives of bytes take almost twice as long.
        """
        if ours[0].is_cuda:  # NCCL, where sends and receives would have to be begun as one
            self.wait(self.group.alltoall(theirs, ours))
            return
        others = [host for host in range(self.n_hosts) if host != self.host]
        works = [self.group.recv([theirs[host]], host, 0) for host in others]
        self.wait(*works, *(self.group.send([ours[host]], host, 0) for host in others))


def _filled_up(part: torch.Tensor, n: int) -> torch.Tensor:
    """The last part, which may be shorter than the others, with zeros behind it; others as they are."""
    return part if len(part) == n else torch.nn.functional.pad(part, (0, n - len(part)))
