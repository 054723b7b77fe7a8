"""A transport: one way in which ranks reach each other's blocks, and the collectives that it can do.

All ranks call the same collective with the same arguments. Each has four parts, and two barriers:

    offer    what has been asked of this rank's device so far is what the others will find
    barrier  all have offered
    accept   what is asked of the device from now on needs what all have offered
    work     fold or copy this rank's part
    barrier  all have worked
    settle   what is asked of the device from now on needs what all have worked

A barrier puts the processes in order, not what their devices do: a device works through its stream behind its
process's back. offer, accept and settle tie the work of a device to that of the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange import ALIGNMENT, OPS, Op, Span, shard
from lockstep.memory import Block

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
    """One rank's end. n_elements: of every rank's block.

    clock: told 'meet' and 'exchange' when these phases of a collective begin; a stopwatch's `enter`.
    chunk: how many elements are best folded, used and spread at a time; None: all at once.
    overlaps: whether the device folds what was marked while it computes something else.
    """

    name: str
    chunk: int | None = None
    overlaps = False

    def __init__(self, group: Group, n_elements: int) -> None:
        self.group, self.n_elements = group, n_elements
        self.clock: Callable[[str], None] = lambda phase: None

    def all_reduce(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        """The span of every block becomes the fold of all blocks', in rank order.

        span: elements [first, last), `first` a multiple of ALIGNMENT. barrier: called at both barriers with
        words for them, where the group's own will not do. Raises PeerProblem naming who has not come.
        """
        self._run(Collective("all_reduce", span, op), barrier)

    def reduce_scatter(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        """This rank's shard of the span, in its own block, becomes the fold of all blocks'.

        The rest of the block is as before.
        """
        self._run(Collective("reduce_scatter", span, op), barrier)

    def all_gather(self, span: Span, barrier: Barrier | None = None) -> None:
        """Every rank's shard of the span, as it is in its own block, comes into all blocks."""
        self._run(Collective("all_gather", span), barrier)

    def broadcast(self, span: Span, source: int, barrier: Barrier | None = None) -> None:
        """The span of rank `source`'s block comes into all blocks."""
        self._run(Collective("broadcast", span, source=source), barrier)

    def update(
        self,
        others: "Transport",
        span: Span,
        op: Op,
        step: Callable[[Span], None],
        barrier: Barrier | None = None,
    ) -> None:
        """An all-reduce from the blocks of `others` into these, with a step of the caller's in its middle.

        This rank's shard of the span, in the block of `others`, becomes the fold of all ranks'. `step` is
        called with consecutive pieces of that shard, once they are there, and changes this transport's block.
        What it has left there comes into all blocks. With pieces as large as `chunk` all that happens while a
        core's cache holds them. Raises PeerProblem naming who has not come.
        """
        self.reduce(others, [span], op, barrier)
        for piece in self.pieces(span):
            others.fold(piece, op)
            step(piece)
            self.spread(piece)
        self.publish([span], barrier)

    def reduce(
        self, others: "Transport", spans: Sequence[Span], op: Op, barrier: Barrier | None = None
    ) -> None:
        """The first part of `update`: from here on `fold` may be called for pieces of this rank's shards.

        spans: several, of the blocks of `others`, that share no element.
        """
        for span in spans:
            others.reduce_scatter(span, op, barrier)

    def fold(self, span: Span, op: Op) -> None:  # noqa: B027 (`reduce` has done it)
        """A piece of this rank's shard, in its own block, is the fold of all blocks' from here on."""

    def spread(self, span: Span) -> None:  # noqa: B027 (`publish` will do it)
        """A piece of this rank's shard is on its way into all blocks from here on."""

    def publish(self, spans: Sequence[Span], barrier: Barrier | None = None) -> None:
        """The last part of `update`: what every rank has spread of the spans is in all blocks."""
        for span in spans:
            self.all_gather(span, barrier)

    def sum_early(self, spans: Sequence[Span], op: Op) -> Callable[[int], None] | None:
        """Where sums take long, and processors: what to call with the number of a span that is full.

        Its sum then begins at once, and a later `reduce` from this transport finds it done. To be called for
        all spans, in each step, before that. None: it can't. All ranks call it at once.
        """
        return None

    def open_marks(self, number: int) -> None:
        """Where it `overlaps`: makes marks, numbered from 0. All ranks call it at once."""
        raise NotImplementedError

    def mark(self, number: int) -> None:
        """What was asked of this rank's device so far is all that others need for `fold_marked(number)`."""
        raise NotImplementedError

    def fold_marked(self, number: int, span: Span, op: Op) -> None:
        """After `reduce`: `fold`, as soon as all ranks' devices have come to the mark, beside other work."""
        raise NotImplementedError

    def join(self) -> None:
        """What is asked of the device from now on needs all that `fold_marked` was called for."""
        raise NotImplementedError

    def exchange_rows(self, barrier: Barrier | None = None) -> None:
        """The block is a table of one row a rank; row r of rank r's comes into all blocks.

        A rank may write its row again when all have come to another collective after this one.
        """
        assert self.n_elements % (ALIGNMENT * self.group.world.size) == 0
        self.all_gather((0, self.n_elements), barrier)

    def exchange_rows_of_hosts(self, barrier: Barrier | None = None) -> None:
        """The block is a table with a row a rank of this host, in which there is a part for each host.

        Likewise, with this host's part of this rank's row, which comes into all blocks of all hosts.
        """
        self.exchange_rows(barrier)

    def within(self) -> "Transport":
        """The one that does the same among the ranks of this host only."""
        return self

    def pieces(self, span: Span) -> list[Span]:
        """This rank's shard of a span, cut into pieces of `chunk` elements."""
        first, last = self.shard(span)
        step = self.chunk or max(1, last - first)
        return [(start, min(start + step, last)) for start in range(first, last, step)]

    def another(self, block: Block, flat: "torch.Tensor") -> "Transport":
        """The same way to reach other blocks; all ranks call it at once. flat: all of this rank's, (n,).

        For rules with blocks of their own. Raises UserError where a transport can't.
        """
        raise UserError(f"exchange: {self.name} reaches arenas only: set rule: weights or local")

    def shard(self, span: Span) -> Span:
        """This rank's part of a span."""
        return shard(span, self.group.world.rank, self.group.world.size)

    @abstractmethod
    def offer(self, collective: Collective) -> None:
        """Before the first barrier."""

    @abstractmethod
    def accept(self) -> None:
        """After the first barrier."""

    @abstractmethod
    def work(self, collective: Collective) -> None:
        """Between the barriers."""

    @abstractmethod
    def settle(self, collective: Collective) -> None:
        """After the second barrier."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the other ranks' memory, when this rank's device has done all that it was asked."""

    def parts(self, collective: Collective) -> tuple[list[int], list[int], Span]:
        """Whose memory this rank reads, whose it writes, and where: one fold, whatever the collective."""
        rank, everyone = self.group.world.rank, list(range(self.group.world.size))
        if collective.kind == "broadcast":
            others = [rank] if rank != collective.source else []
            return [collective.source], others, collective.span
        part = self.shard(collective.span)
        if collective.kind == "all_gather":
            return [rank], [other for other in everyone if other != rank], part
        return everyone, everyone if collective.kind == "all_reduce" else [rank], part

    def _run(self, collective: Collective, barrier: Barrier | None) -> None:
        first, last = collective.span
        assert 0 <= first <= last <= self.n_elements and collective.op in OPS
        barrier = barrier or self.group.barrier
        if not self.group.pipes:  # nobody to meet: phases of no length, each of which costs a device an event
            self._do(collective, barrier, lambda phase: None)
        else:
            self._do(collective, barrier, self.clock)

    def _do(self, collective: Collective, barrier: Barrier, clock: Callable[[str], None]) -> None:
        self.offer(collective)
        clock("meet")
        barrier(f"{collective.kind}: all have offered")
        self.accept()
        clock("exchange")
        self.work(collective)
        clock("meet")
        barrier(f"{collective.kind}: all have worked")
        self.settle(collective)
