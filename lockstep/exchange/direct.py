"""What transports have in common that fold and copy from block to block: `update` with two barriers.

The general one has four, of two collectives. Here what a rank folds is used and spread at once.
"""

from abc import abstractmethod
from collections.abc import Sequence

from lockstep.exchange import ALIGNMENT, Op, Span
from lockstep.exchange.transport import Barrier, Collective, Transport


class DirectTransport(Transport):
    """Its `settle` of an all-reduce brings what all have spread."""

    def reduce(
        self, others: Transport, spans: Sequence[Span], op: Op, barrier: Barrier | None = None
    ) -> None:
        for span in spans:
            others.offer(Collective("reduce_scatter", span, op))
        self.clock("meet")
        (barrier or self.group.barrier)("update: all have offered")
        others.accept()
        self.clock("exchange")

    def publish(self, spans: Sequence[Span], barrier: Barrier | None = None) -> None:
        self.worked()
        self.clock("meet")
        (barrier or self.group.barrier)("update: all have worked")
        for span in spans:
            self.settle(Collective("all_reduce", span))

    def exchange_rows(self, barrier: Barrier | None = None) -> None:
        """With one barrier: every rank fetches the rows of the others."""
        rank, size = self.group.world.rank, self.group.world.size
        length = self.n_elements // size
        assert length % ALIGNMENT == 0 and length * size == self.n_elements
        rows = [Collective("broadcast", (r * length, (r + 1) * length), source=r) for r in range(size)]
        self.offer(rows[rank])
        self.clock("meet")
        (barrier or self.group.barrier)("rows: all have offered")
        self.accept()
        self.clock("exchange")
        for row in rows[:rank] + rows[rank + 1 :]:
            self.work(row)

    @abstractmethod
    def fold(self, span: Span, op: Op) -> None:
        """Between barriers: a span of this rank's shard, in its own block, becomes the fold of all."""

    @abstractmethod
    def spread(self, span: Span) -> None:
        """Between barriers: a span of this rank's shard goes where the other ranks get it by `settle`."""

    def worked(self) -> None:
        """Before the second barrier: this rank's part is done, as far as it was asked of its device."""
