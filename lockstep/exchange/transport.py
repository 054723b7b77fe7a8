"""The interface of a transport: one way in which ranks reach each other's blocks, and its collectives.

All ranks call the same collective with the same arguments. Each has four phases and two barriers:

    prepare    record, in this rank's device queue, that its block is ready to be read
    barrier    all ranks have prepared
    enter      make this rank's device wait until all blocks are ready
    work       reduce or copy this rank's part, and record that it is done
    barrier    all ranks have worked
    complete   make this rank's device wait until all parts are done

A barrier orders the processes, not their devices: a device works through its queue asynchronously. `prepare`,
`enter` and `complete` order the work of a device after that of the others. A transport whose work is
synchronous, as in host memory, needs none of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange import ALIGNMENT, OPS, Op, Span, padded, shard
from lockstep.exchange.tree import PartialSums
from lockstep.memory import Block, Memory

if TYPE_CHECKING:
    import torch

Barrier = Callable[[str], None]


@dataclass(frozen=True)
class Collective:
    """A collective and its arguments. source: the rank that a broadcast comes from."""

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    span: Span
    op: Op = "sum"
    source: int = 0


class Transport(ABC):
    """One rank's end of the collectives over one block of each rank.

    Args:
        group: The processes of this host.
        n_elements: The size of every rank's block.

    Attributes:
        name: For people.
        chunk: How many elements to reduce, use and scatter at a time, so that they stay in a core's cache;
            None for all at once.
        clock: Called with 'barrier' and 'exchange' when these phases begin; a stopwatch's `enter`.
        partial_sums: The sources of op 'pairwise'; by default the same span of each rank's block.
    """

    name: str
    chunk: int | None = None

    def __init__(self, group: Group, n_elements: int) -> None:
        self.group, self.n_elements = group, n_elements
        self.clock: Callable[[str], None] = lambda phase: None
        self.partial_sums = PartialSums.of_ranks(group.world.size)

    # -- collectives -----------------------------------------------------------------------------------------

    def all_reduce(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        """Replace the span in every rank's block by the reduction over all ranks, in rank order.

        Args:
            span: Elements [first, last); `first` must be a multiple of ALIGNMENT.
            op: The reduction.
            barrier: Called at both barriers instead of the group's own.

        Raises:
            PeerProblem: A rank did not arrive in time; the message names it.
        """
        self._run(Collective("all_reduce", span, op), barrier)

    def reduce_scatter(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        """Replace this rank's shard of the span, in its own block, by the reduction over all blocks.

        The rest of the block is unchanged. Arguments and errors are those of `all_reduce`.
        """
        self._run(Collective("reduce_scatter", span, op), barrier)

    def all_gather(self, span: Span, barrier: Barrier | None = None) -> None:
        """Copy every rank's shard of the span, as it is in its own block, into all blocks."""
        self._run(Collective("all_gather", span), barrier)

    def broadcast(self, span: Span, source: int, barrier: Barrier | None = None) -> None:
        """Copy the span of rank `source`'s block into all blocks."""
        self._run(Collective("broadcast", span, source=source), barrier)

    def exchange_rows(self, barrier: Barrier | None = None) -> None:
        """Copy row r of rank r's block into all blocks, which are tables with one row per rank.

        A rank may write its row again when all ranks have entered another collective after this one.
        """
        assert self.n_elements % (ALIGNMENT * self.group.world.size) == 0
        self.all_gather((0, self.n_elements), barrier)

    def exchange_rows_of_hosts(self, barrier: Barrier | None = None) -> None:
        """Do as `exchange_rows` over all hosts: a row has a part for each host, and only this host's is set.

        Afterwards every row of every block has the parts of all hosts.
        """
        self.exchange_rows(barrier)

    # -- an all-reduce with a step in its middle -------------------------------------------------------------

    def update(
        self,
        others: "Transport",
        span: Span,
        op: Op,
        step: Callable[[Span], None],
        barrier: Barrier | None = None,
    ) -> None:
        """Reduce the blocks of `others`, call `step` on this rank's shard, and publish this block.

        Args:
            others: The transport over the blocks that are reduced, of the same way of transport.
            span: Elements [first, last), in both blocks.
            op: The reduction.
            step: Called with consecutive pieces of this rank's shard, as large as `chunk`. The reduced
                piece is in the block of `others`; it writes the same piece of this transport's block.
            barrier: Called at both barriers instead of the group's own.

        Raises:
            PeerProblem: A rank did not arrive in time; the message names it.
        """
        self.reduce(others, [span], op, barrier)
        for piece in self.pieces(span):
            others.reduce_shard(piece, op)
            step(piece)
            self.scatter_shard(piece)
        self.publish([span], barrier)

    def reduce(
        self, others: "Transport", spans: Sequence[Span], op: Op, barrier: Barrier | None = None
    ) -> None:
        """Begin an update: afterwards `others.reduce_shard` may be called for pieces of this rank's shards.

        Args:
            others: The transport over the blocks that are reduced.
            spans: Disjoint spans of these blocks.
            op: The reduction.
            barrier: Called at the barrier instead of the group's own.
        """
        for span in spans:
            others.reduce_scatter(span, op, barrier)

    def reduce_shard(self, span: Span, op: Op) -> None:  # noqa: B027 (`reduce` has done it)
        """Replace a piece of this rank's shard, in its own block, by the reduction over all blocks."""

    def scatter_shard(self, span: Span) -> None:  # noqa: B027 (`publish` will do it)
        """Begin to copy a piece of this rank's shard into all blocks; `publish` completes it."""

    def publish(self, spans: Sequence[Span], barrier: Barrier | None = None) -> None:
        """End an update: wait until the shards that all ranks have scattered are in all blocks."""
        for span in spans:
            self.all_gather(span, barrier)

    def overlapped_reduction(self, spans: Sequence[Span], op: Op) -> Callable[[int], None] | None:
        """Return a callback that starts reducing bucket `i`, or None if the transport cannot overlap.

        All ranks call it at once. The callback is to be called in each step for every bucket, before `reduce`
        from this transport, which finds the buckets reduced.
        """
        return None

    def use_partial_sums(self, partial_sums: PartialSums) -> None:
        """Have op 'pairwise' complete the tree from these sums. All ranks call it between collectives."""
        self.partial_sums = partial_sums

    # -- related transports ----------------------------------------------------------------------------------

    def within(self) -> "Transport":
        """Return the transport that does the same among the ranks of this host only."""
        return self

    def another(self, block: Block, flat: "torch.Tensor") -> "Transport":
        """Open a transport of the same kind over other blocks. All ranks call it at once.

        Args:
            block: This rank's block.
            flat: The whole block as a tensor, (n,).

        Raises:
            UserError: The transport reaches arenas only.
        """
        raise UserError(f"exchange: {self.name} reaches arenas only: set rule: weights or local")

    @abstractmethod
    def close(self) -> None:
        """Close the other ranks' memory, when this rank's device has done its work."""

    # -- shards ----------------------------------------------------------------------------------------------

    def shard(self, span: Span) -> Span:
        """Return this rank's shard of a span."""
        return shard(span, self.group.world.rank, self.group.world.size)

    def pieces(self, span: Span) -> list[Span]:
        """Return this rank's shard of a span, cut into pieces of `chunk` elements."""
        first, last = self.shard(span)
        step = self.chunk or max(1, last - first)
        return [(start, min(start + step, last)) for start in range(first, last, step)]

    def parts(self, collective: Collective) -> tuple[list[int], list[int], Span]:
        """Return the ranks whose blocks this rank reads, those that it writes, and the span.

        Every collective is one reduction of the sources' span into the targets' span.
        """
        rank, ranks = self.group.world.rank, list(range(self.group.world.size))
        if collective.kind == "broadcast":
            others = [rank] if rank != collective.source else []
            return [collective.source], others, collective.span
        part = self.shard(collective.span)
        if collective.kind == "all_gather":
            return [rank], [other for other in ranks if other != rank], part
        return ranks, ranks if collective.kind == "all_reduce" else [rank], part

    # -- the phases of a collective --------------------------------------------------------------------------

    def prepare(self, collective: Collective) -> None:  # noqa: B027 (synchronous work needs none)
        """Record, before the first barrier, that this rank's block is ready to be read."""

    def enter(self) -> None:  # noqa: B027
        """Make the device wait, after the first barrier, until all blocks are ready."""

    @abstractmethod
    def work(self, collective: Collective) -> None:
        """Reduce or copy this rank's part, between the barriers."""

    def complete(self, collective: Collective) -> None:  # noqa: B027
        """Make the device wait, after the second barrier, until all parts are done."""

    def _run(self, collective: Collective, barrier: Barrier | None) -> None:
        first, last = collective.span
        assert 0 <= first <= last <= self.n_elements and collective.op in OPS
        barrier = barrier or self.group.barrier
        # A lone rank's phases have no length, and each would cost a device an event.
        clock: Callable[[str], None] = self.clock if self.group.pipes else lambda phase: None
        self.prepare(collective)
        clock("barrier")
        barrier(f"{collective.kind}: all have prepared")
        self.enter()
        clock("exchange")
        self.work(collective)
        clock("barrier")
        barrier(f"{collective.kind}: all have worked")
        self.complete(collective)


class MarkedReduction(ABC):
    """The optional interface of a transport whose device reduces a bucket beside other work.

    A rank marks a bucket when its gradients are complete; the reduction starts when all ranks have marked it.
    """

    @abstractmethod
    def open_marks(self, number: int) -> None:
        """Make marks, numbered from 0. All ranks call it at once."""

    @abstractmethod
    def mark(self, number: int) -> None:
        """Record that the bucket of this mark is complete in this rank's block."""

    @abstractmethod
    def reduce_marked(self, number: int, span: Span, op: Op) -> None:
        """Do as `reduce_shard`, after `reduce`: as soon as all devices have reached the mark."""

    @abstractmethod
    def join_marked(self) -> None:
        """Make the device wait until all reductions that `reduce_marked` has started are done."""


class SharedRows:
    """A small float64 table of one row per rank. All ranks construct it and exchange at once.

    A rank may write its row again after all ranks have passed another barrier.

    Args:
        transport: Connects arenas of `dtype` of the same ranks.
        memory: Allocates the table.
        n_columns: float64 numbers in a row.
        what: Purpose of the memory, for errors.
    """

    def __init__(
        self, transport: Transport, memory: Memory, n_columns: int, dtype: "torch.dtype", what: str
    ) -> None:
        import torch

        world, width = transport.group.world, padded(n_columns)
        self._block = memory.allocate(8 * width * world.size, what)
        self._table, self._rank = self._block.tensor(torch.float64, (world.size, width)), world.rank
        self._transport = transport.another(self._block, self._table.view(dtype).view(-1))
        self._transport.clock = transport.clock

    def exchange(self, row: "torch.Tensor", barrier: Barrier | None = None) -> None:
        """Share this rank's row (up to n_columns,) with all ranks.

        Raises:
            PeerProblem: A rank did not arrive in time; the message names it.
        """
        self._table[self._rank, : len(row)].copy_(row)
        self._transport.exchange_rows(barrier)

    def rows(self, n_columns: int) -> "torch.Tensor":
        """Return a view of the first columns of all rows: float64 (rank, n_columns)."""
        return self._table[:, :n_columns]

    def close(self) -> None:
        """Close the transport and free the table."""
        self._transport.close()
        self._block.close()
