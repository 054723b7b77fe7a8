"""All-reduce algorithms between hosts: the library's, along a tree with fixed bits, and rounded to bfloat16.

Each leaves equal bits on all hosts. With a sum can go a *row* of a few float64 numbers of each host, so that
they cost no message of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

ProcessGroup = Any  # torch's ProcessGroupGloo or ProcessGroupNCCL, whose stubs share no base class
Begin = Callable[..., Any]  # takes a method of the group and its arguments, and returns a work
Wait = Callable[..., None]  # takes works, and returns when they are done
Row = list[float]
N_NUMBERS = 7  # in a row
BLOCK = 256  # numbers; a host's part of a rounded sum is a multiple of it
PIECE = 1024 * BLOCK  # numbers that are packed and sent at once
_AHEAD = 2  # pieces that are on their way at once, there and back
_ROW_PIECES = 4 * N_NUMBERS
_ROW_BYTES = 8 * N_NUMBERS


class RowTable:
    """A table with one row per host that survives a sum in float32 bit for bit.

    float32 is too coarse for counts of millions. So each host fills its own row and leaves zeros in the
    others, and a float64 travels as four pieces of 16 bits, each of which float32 holds exactly.
    """

    def __init__(self, host: int, n_hosts: int) -> None:
        self._host, self._n_hosts = host, n_hosts
        self.n_elements = n_hosts * _ROW_PIECES

    def encode(self, row: Row, like: torch.Tensor) -> torch.Tensor:
        """Return the table with this host's row, (n_elements,), of the dtype and on the device of `like`."""
        table = torch.zeros((self._n_hosts, _ROW_PIECES), dtype=like.dtype)
        pieces = np.array(row, np.float64).view(np.uint16).astype(np.float64)
        table[self._host] = torch.from_numpy(pieces)
        return table.view(-1).to(like.device)

    def decode(self, table: torch.Tensor) -> list[Row]:
        """Return every host's row, by host, from the sum of all tables, (n_elements,)."""
        pieces = table.cpu().double().numpy().astype(np.uint16)
        rows: list[Row] = pieces.view(np.float64).reshape(self._n_hosts, N_NUMBERS).tolist()
        return rows


class AllReduceAlgorithm(ABC):
    """An algorithm that sums a tensor over one trainer of each host.

    Args:
        group: The process group of these trainers.
        begin: Starts an operation of the group; raises if a host has failed.
        wait: Waits for started operations; raises if a host has failed or is late.
        host: The rank in the group.
        n_hosts: The size of the group.
    """

    def __init__(self, group: ProcessGroup, begin: Begin, wait: Wait, host: int, n_hosts: int) -> None:
        self.group, self.begin, self.wait, self.host, self.n_hosts = group, begin, wait, host, n_hosts
        self.others = [other for other in range(n_hosts) if other != host]

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> int:
        """Replace the tensor, (n,), by the sum over all hosts. Return how many bytes this host has sent."""

    @abstractmethod
    def sum_with_row(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        """Do as `sum`, and send a row along. Return the rows of all hosts, by host, and the bytes sent."""

    def swap(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[Any]:
        """Start to send `ours[h]` to each other host h, and to receive `theirs[h]` from it.

        With gloo, on CPUs, these are single messages: over a slow link its collectives take up to twice as
        long. With NCCL they are one collective, since sends and receives would have to be started as one.
        """
        if ours[0].is_cuda:
            return [self.begin(self.group.alltoall, theirs, ours)]
        works = [self.begin(self.group.recv, [theirs[host]], host, 0) for host in self.others]
        return works + [self.begin(self.group.send, [ours[host]], host, 0) for host in self.others]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every host's tensor, (n,), by host."""
        gathered = [torch.empty_like(tensor) for _ in range(self.n_hosts)]
        works, n_piece = [], max(1, len(tensor)) if tensor.is_cuda else PIECE
        for first in range(0, len(tensor), n_piece):
            ours, *theirs = (each[first : first + n_piece] for each in (tensor, *gathered))
            works += self.swap([ours] * self.n_hosts, theirs)
        self.wait(*works)
        gathered[self.host] = tensor
        return gathered


class _Exact(AllReduceAlgorithm):
    """An algorithm without rounding: the table of rows precedes the numbers, in a copy of both."""

    def sum_with_row(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        rows = RowTable(self.host, self.n_hosts)
        both = torch.cat([rows.encode(row, tensor), tensor])
        n_bytes = self.sum(both)
        tensor.copy_(both[rows.n_elements :])
        return rows.decode(both[: rows.n_elements]), n_bytes


class LibraryAllReduce(_Exact):
    """The all-reduce of gloo or NCCL."""

    def sum(self, tensor: torch.Tensor) -> int:
        self.wait(self.begin(self.group.allreduce, [tensor]))
        return 2 * tensor.nbytes * (self.n_hosts - 1) // self.n_hosts


class TreeAllReduce(_Exact):
    """Sums of neighbours, then of neighbouring sums, and so on, as `logical_ranks` adds inside a host.

    The number of hosts is a power of two. On the way up hosts exchange halves with ever more distant
    partners, so that each keeps half of what it kept before; on the way back they gather the halves
    (Rabenseifner 2004). Every number crosses a link as often as in a ring.
    """

    def sum(self, tensor: torch.Tensor) -> int:
        mine, n_bytes = tensor, 0
        halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for distance in self._distances():
            lower, upper = mine.tensor_split(2)
            mine, other = (upper, lower) if self.host & distance else (lower, upper)
            halves.append((mine, other))
            theirs = torch.empty_like(mine)
            n_bytes += self._exchange(self.host ^ distance, other, theirs)
            mine.add_(theirs)
        for distance, (mine, other) in zip(reversed(self._distances()), reversed(halves), strict=True):
            n_bytes += self._exchange(self.host ^ distance, mine, other)
        return n_bytes

    def _distances(self) -> list[int]:
        return [1 << level for level in range(self.n_hosts.bit_length() - 1)]

    def _exchange(self, partner: int, ours: torch.Tensor, theirs: torch.Tensor) -> int:
        """Send and receive at the same time; skip empty tensors."""
        works: list[Any] = []
        if len(theirs):
            works.append(self.begin(self.group.recv, [theirs], partner, 0))
        if len(ours):
            works.append(self.begin(self.group.send, [ours], partner, 0))
        self.wait(*works)
        return ours.nbytes


class BFloat16AllReduce(AllReduceAlgorithm):
    """A sum whose numbers travel as bfloat16; each host adds up one part of them and sends the sum to all.

    A part is cut into pieces, which go through a software pipeline (see `sum_with_row`).
    """

    def sum(self, tensor: torch.Tensor) -> int:
        return self.sum_with_row(tensor, [0.0] * N_NUMBERS)[1]

    def sum_with_row(self, tensor: torch.Tensor, row: Row) -> tuple[list[Row], int]:
        """Do as the base class says.

        A piece has three stages, and `_sum_piece` yields after each of the first two:

            1. round this host's numbers of all other hosts' parts, and start to send them there
            2. wait for the others' numbers of this host's part, add them up, start to send the sum to all
            3. wait for the sums of the other hosts' parts, and copy them into the tensor

        In round k, piece k is in stage 1, piece k - 2 in stage 2 and piece k - 4 in stage 3. So two pieces
        are on their way in each direction while the processor rounds and adds up others.
        """
        rows, cut = [row] * self.n_hosts, list(self._cut(tensor))
        pieces = [self._sum_piece(n, values, rows) for n, values in cut]
        for round_number in range(len(pieces) + 2 * _AHEAD):
            for number in (round_number, round_number - _AHEAD, round_number - 2 * _AHEAD):
                if 0 <= number < len(pieces):
                    next(pieces[number], None)
        n_bytes = sum(2 * 2 * n + _ROW_BYTES for n, _ in cut)
        return rows, len(self.others) * n_bytes

    def _cut(self, tensor: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield each piece: its size, and its numbers of every host's part, fewer at the tensor's end."""
        n_part = max(1, -(-len(tensor) // (self.n_hosts * BLOCK))) * BLOCK
        n_piece = n_part if tensor.is_cuda else PIECE
        for first in range(0, n_part, n_piece):
            n = min(n_piece, n_part - first)
            begins = [host * n_part + first for host in range(self.n_hosts)]
            yield n, [tensor[begin : begin + n] for begin in begins]

    def _sum_piece(self, n: int, values: list[torch.Tensor], rows: list[Row]) -> Iterator[None]:
        """Sum one piece in three stages, and yield between them. Writes the others' rows into `rows`."""
        mine, n_bytes = values[self.host], 2 * n
        row = torch.tensor(rows[self.host], dtype=torch.float64, device=mine.device).view(torch.uint8)
        ours = torch.empty((self.n_hosts, n_bytes + _ROW_BYTES), dtype=torch.uint8, device=mine.device)
        theirs = torch.empty_like(ours)
        for host in self.others:
            _round(values[host], ours[host, :n_bytes])
        ours[:, n_bytes:] = row
        works = self.swap(list(ours), list(theirs))
        yield
        self.wait(*works)
        for host in self.others:
            mine += theirs[host, :n_bytes].view(torch.bfloat16)[: len(mine)]
            rows[host] = theirs[host, n_bytes:].clone().view(torch.float64).tolist()
        total = ours[self.host, :n_bytes]
        _round(mine, total)
        works = self.swap([total] * self.n_hosts, list(theirs[:, :n_bytes]))
        mine.copy_(total.view(torch.bfloat16)[: len(mine)])  # rounded, as all other hosts have it
        yield
        self.wait(*works)
        for host in self.others:
            values[host].copy_(theirs[host, :n_bytes].view(torch.bfloat16)[: len(values[host])])


def _round(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Write the values, (m,), as bfloat16 into `packed`, uint8 (2 n,) with n >= m, and zeros behind them."""
    rounded = packed.view(torch.bfloat16)
    rounded[: len(values)] = values
    rounded[len(values) :] = 0
