"""The base of transports that reduce and copy from block to block: an update with two barriers.

The general update is two collectives with four barriers. Here a rank uses and scatters what it has reduced at
once, between the two barriers.
"""

from abc import abstractmethod
from collections.abc import Sequence

from lockstep.exchange import ALIGNMENT, Op, Span
from lockstep.exchange.transport import Barrier, Collective, Transport


class DirectTransport(Transport):
    """A transport whose `complete` of an all-reduce also completes what all ranks have scattered."""

    def reduce(
        self, others: Transport, spans: Sequence[Span], op: Op, barrier: Barrier | None = None
    ) -> None:
        for span in spans:
            others.prepare(Collective("reduce_scatter", span, op))
        self.clock("barrier")
        (barrier or self.group.barrier)("update: all have prepared")
        others.enter()
        self.clock("exchange")

    def publish(self, spans: Sequence[Span], barrier: Barrier | None = None) -> None:
        self.record_done()
        self.clock("barrier")
        (barrier or self.group.barrier)("update: all have worked")
        for span in spans:
            self.complete(Collective("all_reduce", span))

    def exchange_rows(self, barrier: Barrier | None = None) -> None:
        """Do as the base class says, with one barrier: every rank fetches the rows of the others."""
        rank, size = self.group.world.rank, self.group.world.size
        length = self.n_elements // size
        assert length % ALIGNMENT == 0 and length * size == self.n_elements
        rows = [Collective("broadcast", (r * length, (r + 1) * length), source=r) for r in range(size)]
        self.prepare(rows[rank])
        self.clock("barrier")
        (barrier or self.group.barrier)("rows: all have prepared")
        self.enter()
        self.clock("exchange")
        for row in rows[:rank] + rows[rank + 1 :]:
            self.work(row)

    @abstractmethod
    def reduce_shard(self, span: Span, op: Op) -> None:
        """Do as the base class says; between the two barriers of an update."""

    @abstractmethod
    def scatter_shard(self, span: Span) -> None:
        """Copy a piece of this rank's shard to where the other ranks get it by `complete`."""

    def record_done(self) -> None:
        """Record, before the second barrier, that this rank's part is done."""
