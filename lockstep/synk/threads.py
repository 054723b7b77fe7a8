"""How many threads BLAS and OpenMP have in this process while a team shares its cores."""

from typing import Any

from threadpoolctl import threadpool_limits


class Threads:
    """Limits the libraries that are loaded; `limit` again when more may have been. `restore` undoes all."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._limits: list[Any] = []
        self.limit()

    def limit(self) -> None:
        self._limits.append(threadpool_limits(limits=self.number))

    def restore(self) -> None:
        while self._limits:
            self._limits.pop().restore_original_limits()
