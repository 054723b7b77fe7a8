"""How many threads BLAS, OpenMP and torch have in this process while a team shares its cores."""

import sys
from typing import Any

from threadpoolctl import threadpool_limits


class Threads:
    """Limits the libraries that are loaded; `limit` again when more may have been. `restore` undoes all."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._limits: list[Any] = []
        self._of_torch: int | None = None
        self.limit()

    def limit(self) -> None:
        if "torch" in sys.modules and self._of_torch is None:
            import torch

            self._of_torch = torch.get_num_threads()
            torch.set_num_threads(self.number)
        self._limits.append(threadpool_limits(limits=self.number))

    def restore(self) -> None:
        while self._limits:
            self._limits.pop().restore_original_limits()
        if self._of_torch is not None:
            import torch

            torch.set_num_threads(self._of_torch)
            self._of_torch = None
