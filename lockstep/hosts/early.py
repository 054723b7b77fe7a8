"""Sums that begin while backward still computes other gradients: in a thread, one after the other."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class EarlySums:
    """work: sums the span of a number. n_early: of how many, from 0 on; it leaves those after them alone.

    Spans are summed in the order of their numbers, whatever the order in which they become full, for that
    may differ among trainers, who have to meet in each.
    """

    def __init__(self, work: Callable[[int], None], n_early: int) -> None:
        self._work, self.n_early = work, n_early
        self._thread = ThreadPoolExecutor(1, "sums over the network")
        self._full: set[int] = set()
        self._begun: list[Future[None]] = []

    def mark(self, number: int) -> None:
        """Nothing is to come into a span any more. To be called once in a step for each."""
        self._full.add(number)
        while len(self._begun) in self._full and len(self._begun) < self.n_early:
            self._begun.append(self._thread.submit(self._work, len(self._begun)))

    def finish(self) -> None:
        """After a step's backward, when all are marked: until all early sums are there.

        Raises what went wrong with the first that did; each of its waits has a deadline. Once it has ended it
        may be called again before the next step.
        """
        if not self._full:
            return
        assert len(self._begun) == self.n_early, "all spans are full at the end of backward"
        for each in self._begun:
            each.result()
        self._full.clear()
        self._begun.clear()

    def close(self) -> None:
        self._thread.shutdown()
