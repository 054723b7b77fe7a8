"""A few numbers that ride in the buffer of a sum, so that they cost no message of their own.

Sums are of float32, which is too coarse for counts of millions. So each host's numbers travel as they are, in
a table with a row for each host: every float64 as four pieces of 16 bits, which float32 holds exactly, and
zeros in the rows of the others.
"""

import numpy as np
import torch

Row = list[float]
N_NUMBERS = 6  # in a row
_PIECES = 4 * N_NUMBERS


class Riders:
    """The table of `n_hosts` hosts, of which this is number `host`."""

    def __init__(self, host: int, n_hosts: int) -> None:
        self._host, self._n_hosts = host, n_hosts
        self.n_elements = n_hosts * _PIECES

    def encode(self, row: Row, like: torch.Tensor) -> torch.Tensor:
        """The table with this host's row, (n_elements,), of the dtype and on the device of `like`."""
        table = torch.zeros((self._n_hosts, _PIECES), dtype=like.dtype)
        pieces = np.array(row, np.float64).view(np.uint16).astype(np.float64)
        table[self._host] = torch.from_numpy(pieces)
        return table.view(-1).to(like.device)

    def decode(self, table: torch.Tensor) -> list[Row]:
        """Every host's row, from the sum of all tables."""
        pieces = table.cpu().double().numpy().astype(np.uint16)
        rows: list[Row] = pieces.view(np.float64).reshape(self._n_hosts, N_NUMBERS).tolist()
        return rows
