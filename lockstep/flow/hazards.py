"""Which operation must wait for which: the edges that follow from what each reads and writes.

Pure: engine and program both use it, with whatever they call an operation. The three kinds of hazard
(Hennessy and Patterson, "Computer Architecture", section 3.1) are one function each.
"""

from collections.abc import Iterable
from typing import Any

_FEW = 16  # readers that are kept without looking whether they have finished


class Uses:
    """Who makes the present value of a variable, and who reads that value. Operations have `.settled`."""

    __slots__ = ("_look_at", "readers", "writer")

    def __init__(self) -> None:
        self.writer: Any = None
        self.readers: list[Any] = []
        self._look_at = _FEW

    def add_reader(self, operation: Any) -> None:
        """Readers that have finished are forgotten: a constant's would be ever more."""
        if len(self.readers) >= self._look_at:
            self.readers = [reader for reader in self.readers if not reader.settled]
            self._look_at = max(_FEW, 2 * len(self.readers))
        self.readers.append(operation)


def read_after_write(uses: Uses) -> list[Any]:
    """Who must have finished before the value can be read."""
    return [] if uses.writer is None else [uses.writer]


def write_after_read(uses: Uses) -> list[Any]:
    """Who must have read the old value before a new one is written."""
    return uses.readers


def write_after_write(uses: Uses) -> list[Any]:
    """Who must have written the old value before a new one is written."""
    return [] if uses.writer is None else [uses.writer]


def order(operation: Any, reads: Iterable[Uses], writes: Iterable[Uses]) -> tuple[list[Any], list[Any]]:
    """Notes what the operation uses. Returns those whose values it needs, and those that it only follows.

    What fails takes along those who need it, not those who follow. An operation can be in both lists, and
    more than once.
    """
    needs: list[Any] = []
    follows: list[Any] = []
    for uses in reads:
        needs += read_after_write(uses)
    for uses in writes:
        follows += write_after_read(uses)
        follows += write_after_write(uses)
    for uses in reads:
        uses.add_reader(operation)
    for uses in writes:
        uses.writer, uses.readers = operation, []
    return needs, follows
