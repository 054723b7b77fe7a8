"""A small float64 table with one row per trainer, which all trainers share by an all-gather."""

from collections.abc import Callable

import torch

from lockstep.exchange import padded
from lockstep.exchange.transport import Barrier, Transport
from lockstep.network.arena import Arena


class SharedRows:
    """A table of one row per rank. All ranks construct it and exchange at once.

    A rank may write its row again after all ranks have passed another barrier.

    Args:
        transport: Connects the arenas of the same ranks.
        arena: This rank's.
        n_columns: float64 numbers in a row.
        what: Purpose of the memory, for errors.
    """

    def __init__(self, transport: Transport, arena: Arena, n_columns: int, what: str) -> None:
        world, width = transport.group.world, padded(n_columns)
        self._block = arena.memory.allocate(8 * width * world.size, what)
        self._table, self._rank = self._block.tensor(torch.float64, (world.size, width)), world.rank
        self._transport = transport.another(self._block, self._table.view(arena.flat.dtype).view(-1))

    def use_clock(self, clock: Callable[[str], None]) -> None:
        """Call `clock` with 'barrier' and 'exchange' when these phases begin."""
        self._transport.clock = clock

    def exchange(self, row: torch.Tensor, barrier: Barrier | None = None) -> None:
        """Share this rank's row (up to n_columns,) with all ranks.

        Raises:
            PeerProblem: A rank did not arrive in time; the message names it.
        """
        self._table[self._rank, : len(row)].copy_(row)
        self._transport.exchange_rows(barrier)

    def rows(self, n_columns: int) -> torch.Tensor:
        """Return a view of the first columns of all rows: float64 (rank, n_columns)."""
        return self._table[:, :n_columns]

    def close(self) -> None:
        """Close the transport and free the table."""
        self._transport.close()
        self._block.close()
