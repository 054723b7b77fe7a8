"""Three ways to a sum over hosts: all-reduce, along a tree with bits that are always the same, and rounded.

Each leaves equal bits on all hosts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.hosts.riders import N_NUMBERS, Riders, Row
from lockstep.hosts.wire import BLOCK, Wire

Connected = Any  # torch's ProcessGroupGloo or ProcessGroupNCCL, whose stubs share no base with these methods
Begin = Callable[..., Any]  # takes a method of the group and its arguments, and returns a work
Wait = Callable[..., None]  # takes works, and ends when they are done
PIECE = 1024 * BLOCK  # numbers that are packed and sent at once
_AHEAD = 2  # pieces that are on their way at once, there and back


class Way(ABC):
    """group: a trainer of each host. begin, wait: both raise where a host is gone, or late."""

    def __init__(self, group: Connected, begin: Begin, wait: Wait, host: int, n_hosts: int) -> None:
        self.group, self.begin, self.wait, self.host, self.n_hosts = group, begin, wait, host, n_hosts
        self.others = [other for other in range(n_hosts) if other != host]

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> int:
        """The tensor, (n,), becomes the sum of all hosts'. Returns how many bytes this host has sent."""

    @abstractmethod
    def sum_with(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        """The same, with a row of numbers. Returns also the rows of all hosts, by host."""

    def swap(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[Any]:
        """Begins to send each other host its own, and to receive from each; lists are by host.

        One by one with gloo, on CPUs: over a limited link its collectives take up to twice as long.
        """
        if ours[0].is_cuda:  # NCCL, where sends and receives would have to be begun as one
            return [self.begin(self.group.alltoall, theirs, ours)]
        works = [self.begin(self.group.recv, [theirs[host]], host, 0) for host in self.others]
        return works + [self.begin(self.group.send, [ours[host]], host, 0) for host in self.others]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every host's, (n,), by host."""
        found = [torch.empty_like(tensor) for _ in range(self.n_hosts)]
        works, n_piece = [], max(1, len(tensor)) if tensor.is_cuda else PIECE
        for first in range(0, len(tensor), n_piece):
            ours, *theirs = (each[first : first + n_piece] for each in (tensor, *found))
            works += self.swap([ours] * self.n_hosts, theirs)
        self.wait(*works)
        found[self.host] = tensor
        return found


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
        self.wait(self.begin(self.group.allreduce, [tensor]))
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
            works.append(self.begin(self.group.recv, [theirs], partner, 0))
        if len(ours):
            works.append(self.begin(self.group.send, [ours], partner, 0))
        self.wait(*works)
        return ours.nbytes


class Rounded(Way):
    """Each host adds up one part of the numbers, as they come over the wire, and sends the sum to all.

    A part goes in pieces: while some are on their way, others are packed, added up and unpacked. generator:
    for a wire that rounds at random; seeded by `begin`.
    """

    def __init__(
        self,
        group: Connected,
        begin: Begin,
        wait: Wait,
        host: int,
        n_hosts: int,
        wire: Wire,
        device: torch.device,
    ) -> None:
        super().__init__(group, begin, wait, host, n_hosts)
        self._wire, self.generator = wire, torch.Generator(device)

    def sum(self, tensor: torch.Tensor) -> int:
        return self.sum_with(tensor, [0.0] * N_NUMBERS)[1]

    def sum_with(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        rows, cut = [row] * self.n_hosts, list(self._cut(tensor))
        pieces = [self._piece(n, values, rows) for n, values in cut]
        for number in range(len(pieces) + 2 * _AHEAD):
            for each in (number, number - _AHEAD, number - 2 * _AHEAD):
                if 0 <= each < len(pieces):
                    next(pieces[each], None)
        n_bytes = sum(2 * self._wire.n_bytes(n) + 8 * N_NUMBERS for n, _ in cut)
        return rows, len(self.others) * n_bytes

    def _cut(self, tensor: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """How many numbers each piece has, and its numbers of every host's part; fewer at the end of all."""
        n_each = max(1, -(-len(tensor) // (self.n_hosts * BLOCK))) * BLOCK  # numbers of a part
        n_piece = n_each if tensor.is_cuda else PIECE
        for first in range(0, n_each, n_piece):
            n = min(n_piece, n_each - first)
            begins = [host * n_each + first for host in range(self.n_hosts)]
            yield n, [tensor[begin : begin + n] for begin in begins]

    def _piece(self, n: int, values: list[torch.Tensor], rows: list[Row]) -> Iterator[None]:
        """Sums a piece in three goes; between them its numbers are on their way. rows: gets the others'."""
        mine, n_bytes = values[self.host], self._wire.n_bytes(n)
        rider = torch.tensor(rows[self.host], dtype=torch.float64, device=mine.device).view(torch.uint8)
        ours = torch.empty((self.n_hosts, n_bytes + len(rider)), dtype=torch.uint8, device=mine.device)
        theirs = torch.empty_like(ours)
        for host in self.others:
            self._wire.pack(_filled_up(values[host], n), ours[host, :n_bytes], self.generator)
        ours[:, n_bytes:] = rider
        works = self.swap(list(ours), list(theirs))
        yield
        self.wait(*works)
        for host in self.others:
            mine += self._wire.unpack(theirs[host, :n_bytes])[: len(mine)]
            rows[host] = theirs[host, n_bytes:].clone().view(torch.float64).tolist()
        total = ours[self.host, :n_bytes]
        self._wire.pack(_filled_up(mine, n), total, self.generator)
        works = self.swap([total] * self.n_hosts, list(theirs[:, :n_bytes]))
        mine.copy_(self._wire.unpack(total)[: len(mine)])  # as all the others have it
        yield
        self.wait(*works)
        for host in self.others:
            values[host].copy_(self._wire.unpack(theirs[host, :n_bytes])[: len(values[host])])


def _filled_up(part: torch.Tensor, n: int) -> torch.Tensor:
    """The last part, which may be shorter than the others, with zeros behind it; others as they are."""
    return part if len(part) == n else torch.nn.functional.pad(part, (0, n - len(part)))
