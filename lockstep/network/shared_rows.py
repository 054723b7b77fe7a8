"""A small table with a row for each trainer, which all show each other: sums over tensors, of float64."""

from collections.abc import Callable

import torch

from lockstep.exchange import ALIGNMENT
from lockstep.exchange.transport import Barrier, Transport
from lockstep.memory import Memory


class SharedRows:
    """n_columns: float64 in a row. transport: over arenas of `dtype`, the way to the others.

    All ranks make one and exchange at once. A rank may write its row again when all have come to another
    meeting after that.
    """

    def __init__(
        self, transport: Transport, memory: Memory, n_columns: int, dtype: torch.dtype, what: str
    ) -> None:
        world, padded = transport.group.world, -(-n_columns // ALIGNMENT) * ALIGNMENT
        self._block = memory.allocate(8 * padded * world.size, what)
        self._table, self._rank = self._block.tensor(torch.float64, (world.size, padded)), world.rank
        self._transport = transport.another(self._block, self._table.view(dtype).view(-1))

    def use_clock(self, clock: Callable[[str], None]) -> None:
        """Told 'meet' and 'exchange' when these phases begin."""
        self._transport.clock = clock

    def exchange(self, row: torch.Tensor, barrier: Barrier | None = None) -> None:
        """row: this rank's, (up to n_columns,). Raises PeerProblem naming who has not come."""
        self._table[self._rank, : len(row)].copy_(row)
        self._transport.exchange_rows(barrier)

    def rows(self, n_columns: int) -> torch.Tensor:
        """A view of the first columns of all rows: (rank, n_columns), float64."""
        return self._table[:, :n_columns]

    def close(self) -> None:
        self._transport.close()
        self._block.close()
