"""A transport over all hosts: a transport inside each host, and sums of each shard over the network.

The transport inside a host reduces a shard over the trainers of that host. The shard's owner then sums it
with the trainers of its local rank on the other hosts, before it is used. All else stays inside the host.
Shards are of weights and momenta (`rule: weights`) or of gradients. Each host contributes its mean over the
number of hosts, so the sum is the mean of all; hosts/all_reduce.py computes it over the network.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.exchange import Op, Span
from lockstep.exchange.host import HostTransport
from lockstep.exchange.transport import Barrier, Collective, Transport
from lockstep.exchange.tree import PartialSums
from lockstep.hosts.all_reduce import Row
from lockstep.hosts.network import HostNetwork, OverlappedReduction
from lockstep.memory import Block
from lockstep.sync import StepBarrier


class HostsStepBarrier(StepBarrier):
    """The barrier of a step whose sum over the network also carries a row of numbers of each host.

    The payloads of this host's trainers are known at the first barrier, and the sum follows it. So the
    barrier, which is an argument of the sum, makes the row, and takes the rows of all hosts.

    Args:
        host_row: Returns this host's row from the payloads of its trainers, in rank order.
        group, order, payload, say: As of StepBarrier.

    Attributes:
        rows: Those of all hosts, by host, when they have been summed; None before.
    """

    def __init__(
        self,
        host_row: Callable[[list[Any]], Row],
        group: Group,
        order: Order,
        payload: Any,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(group, order, payload, say)
        self._host_row = host_row
        self.rows: list[Row] | None = None

    def host_row(self) -> Row:
        """Return this host's row, after the first barrier."""
        assert self.all_payloads is not None, "the payloads travel with the first barrier"
        return self._host_row(self.all_payloads)


class HierarchicalTransport(Transport):
    """One rank's end of a transport over all hosts.

    Args:
        inside: The transport of this host.
        flat: The whole of this rank's block, (n,).
        network: To the trainers of this local rank on the other hosts.
        rounds: Whether its sums may be rounded on the way, as `network_dtype` says.
    """

    def __init__(
        self, inside: Transport, flat: torch.Tensor, network: HostNetwork, rounds: bool = False
    ) -> None:
        self._inside = inside
        super().__init__(inside.group, inside.n_elements)
        self._flat, self._network, self._rounds = flat, network, rounds
        self._n_hosts, self._host = network.world.n_hosts, network.world.host
        self.name = f"{inside.name} in {self._n_hosts} hosts, {network.name} between them"
        self.chunk = inside.chunk
        self._overlapped: OverlappedReduction | None = None

    def within(self) -> Transport:
        return self._inside

    def all_reduce(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        self.reduce(self, [span], op, barrier)
        for piece in self.pieces(span):
            self.scatter_shard(piece)
        self.publish([span], barrier)

    def reduce_scatter(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        self._inside.reduce_scatter(span, op, barrier)
        self._clock("exchange")
        self._scale(self.shard(span), op)
        self._sum_over_hosts([span], barrier)

    def all_gather(self, span: Span, barrier: Barrier | None = None) -> None:
        """Copy the shards of this host's ranks into its blocks, since the other hosts have the same."""
        self._inside.all_gather(span, barrier)

    def broadcast(self, span: Span, source: int, barrier: Barrier | None = None) -> None:
        """Copy the span of a rank of this host into the blocks of this host."""
        self._inside.broadcast(span, source, barrier)

    def reduce(
        self, others: Transport, spans: Sequence[Span], op: Op, barrier: Barrier | None = None
    ) -> None:
        """Do the whole reduction: this rank's shards are reduced over all hosts when it returns."""
        assert isinstance(others, HierarchicalTransport)
        self._finish_overlapped()
        left = spans[others._overlapped.n_overlapped :] if others._overlapped else spans
        self._inside.reduce(others._inside, left, op, barrier)
        others._reduce_and_sum(left, op, barrier)

    def overlapped_reduction(self, spans: Sequence[Span], op: Op) -> Callable[[int], None] | None:
        """Do as the base class says, for all buckets but the last.

        The last one is summed after backward, together with the row of the step's barrier, which is not known
        before. Only CPUs overlap.
        """
        if not isinstance(self._inside, HostTransport):
            return None

        def work(number: int) -> None:
            self.group.barrier(f"gradients {number} are complete")
            self._reduce_and_sum([spans[number]], op)

        self._overlapped = self._network.overlapped = OverlappedReduction(work, len(spans) - 1)
        return self._overlapped.mark

    def use_partial_sums(self, partial_sums: PartialSums) -> None:
        """Have each host complete its subtree; the sum over the network completes the whole tree."""
        self._inside.use_partial_sums(partial_sums)

    def scatter_shard(self, span: Span) -> None:
        self._inside.scatter_shard(span)

    def publish(self, spans: Sequence[Span], barrier: Barrier | None = None) -> None:
        self._inside.publish(spans, barrier)

    def exchange_rows(self, barrier: Barrier | None = None) -> None:
        self._inside.exchange_rows(barrier)

    def exchange_rows_of_hosts(self, barrier: Barrier | None = None) -> None:
        row = self._flat.view(self.group.world.size, self._n_hosts, -1)[self.group.world.rank]
        self._finish_overlapped()
        for host, theirs in enumerate(self._network.gather(row[self._host])):
            if host != self._host:
                row[host].copy_(theirs)
        self._inside.exchange_rows(barrier)

    def another(self, block: Block, flat: torch.Tensor) -> "HierarchicalTransport":
        return HierarchicalTransport(self._inside.another(block, flat), flat, self._network, rounds=True)

    def close(self) -> None:
        if self._overlapped:
            self._overlapped.close()
        self._inside.close()

    @property
    def clock(self) -> Callable[[str], None]:
        """The clock of this transport and of the one inside the host."""
        return self._clock

    @clock.setter
    def clock(self, clock: Callable[[str], None]) -> None:
        self._clock = self._inside.clock = clock

    def _finish_overlapped(self) -> None:
        """Wait for the sums in the thread, which use the network and this host's pipes exclusively."""
        self._clock("exchange")
        if self._network.overlapped:
            self._network.overlapped.finish()

    def _reduce_and_sum(self, spans: Sequence[Span], op: Op, barrier: Barrier | None = None) -> None:
        """Reduce this rank's shards inside the host, when all its ranks are ready, and over the hosts."""
        for span in spans:
            for piece in self.pieces(span):
                self._inside.reduce_shard(piece, op)
                self._scale(piece, op)
        self._sum_over_hosts(spans, barrier)

    def _scale(self, span: Span, op: Op) -> None:
        """Turn this host's mean into its share of the mean of all hosts, while a core's cache holds it."""
        assert op in ("mean", "sum", "pairwise")
        if op == "mean":
            self._flat[slice(*span)].div_(self._n_hosts)

    def _sum_over_hosts(self, spans: Sequence[Span], barrier: Barrier | None) -> None:
        """Sum this rank's shards over the network; the first sum after a step's barrier carries its row."""
        tensors = [self._flat[slice(*self.shard(span))] for span in spans]
        if isinstance(barrier, HostsStepBarrier) and barrier.rows is None:
            barrier.rows = self._network.sum_with_row(tensors, barrier.host_row(), self._rounds)
        else:
            self._network.sum(tensors, self._rounds)

    def work(self, collective: Collective) -> None:
        self._inside.work(collective)
