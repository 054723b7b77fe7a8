"""A transport over several hosts: one inside the host, and sums of each trainer's shard over the network.

What a transport inside a host folds is then the sum of one host's trainers; its owner sums it with its likes
on other hosts before it is used. Everything else stays inside the host.
"""

from collections.abc import Callable, Sequence

import torch

from lockstep.exchange import Op, Span
from lockstep.exchange.host import HostTransport
from lockstep.exchange.transport import Barrier, Collective, Transport
from lockstep.hosts.early import EarlySums
from lockstep.hosts.network import Network
from lockstep.memory import Block


class OverHosts(Transport):
    """inside: the transport of this host. flat: the whole of this rank's block, (n,).

    rounds: whether its sums may be rounded on the way, as `wire` says.
    """

    def __init__(self, inside: Transport, flat: torch.Tensor, network: Network, rounds: bool = False) -> None:
        self._inside = inside
        super().__init__(inside.group, inside.n_elements)
        self._flat, self._network, self._rounds = flat, network, rounds
        self._n_hosts, self._host = network.world.n_hosts, network.world.host
        self.name = f"{inside.name} in {self._n_hosts} hosts, {network.name} between them"
        self.chunk = inside.chunk
        self._early: EarlySums | None = None

    def within(self) -> Transport:
        return self._inside

    def all_reduce(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        self.reduce(self, [span], op, barrier)
        for piece in self.pieces(span):
            self.spread(piece)
        self.publish([span], barrier)

    def reduce_scatter(self, span: Span, op: Op = "mean", barrier: Barrier | None = None) -> None:
        self._inside.reduce_scatter(span, op, barrier)
        self._clock("exchange")
        self._share(self.shard(span), op)
        self._sum([span])

    def all_gather(self, span: Span, barrier: Barrier | None = None) -> None:
        """From the trainers of this host, as the others have the same."""
        self._inside.all_gather(span, barrier)

    def broadcast(self, span: Span, source: int, barrier: Barrier | None = None) -> None:
        """source: a rank of this host."""
        self._inside.broadcast(span, source, barrier)

    def reduce(
        self, others: Transport, spans: Sequence[Span], op: Op, barrier: Barrier | None = None
    ) -> None:
        """All of it: the sums of this rank's shards are there when it ends."""
        assert isinstance(others, OverHosts)
        self._wait_for_early_sums()
        left = spans[others._early.n_early :] if others._early else spans
        self._inside.reduce(others._inside, left, op, barrier)
        others._fold_and_sum(left, op)

    def sum_early(self, spans: Sequence[Span], op: Op) -> Callable[[int], None] | None:
        """All but the last, with which this step's small words ride, that are known when backward is over."""
        if not isinstance(self._inside, HostTransport):
            return None

        def work(number: int) -> None:
            self.group.barrier(f"gradients {number} are there")
            self._fold_and_sum([spans[number]], op)

        self._early = self._network.early = EarlySums(work, len(spans) - 1)
        return self._early.mark

    def spread(self, span: Span) -> None:
        self._inside.spread(span)

    def publish(self, spans: Sequence[Span], barrier: Barrier | None = None) -> None:
        self._inside.publish(spans, barrier)

    def exchange_rows(self, barrier: Barrier | None = None) -> None:
        self._inside.exchange_rows(barrier)

    def exchange_rows_of_hosts(self, barrier: Barrier | None = None) -> None:
        row = self._flat.view(self.group.world.size, self._n_hosts, -1)[self.group.world.rank]
        self._wait_for_early_sums()
        for host, theirs in enumerate(self._network.gather(row[self._host])):
            if host != self._host:
                row[host].copy_(theirs)
        self._inside.exchange_rows(barrier)

    def another(self, block: Block, flat: torch.Tensor) -> "OverHosts":
        return OverHosts(self._inside.another(block, flat), flat, self._network, rounds=True)

    def close(self) -> None:
        if self._early:
            self._early.close()
        self._inside.close()

    @property
    def clock(self) -> Callable[[str], None]:
        return self._clock

    @clock.setter
    def clock(self, clock: Callable[[str], None]) -> None:
        self._clock = self._inside.clock = clock

    def _wait_for_early_sums(self) -> None:
        """They use the network, and the pipes inside this host: nobody else may meanwhile."""
        self._clock("exchange")
        if self._network.early:
            self._network.early.finish()

    def _fold_and_sum(self, spans: Sequence[Span], op: Op) -> None:
        """Of this rank's shards, when all of this host's are there."""
        for span in spans:
            for piece in self.pieces(span):
                self._inside.fold(piece, op)
                self._share(piece, op)
        self._sum(spans)

    def _share(self, span: Span, op: Op) -> None:
        """What is folded inside this host becomes its share: now, while a core's cache holds it."""
        assert op in ("mean", "sum", "pairwise")
        if op == "mean":
            self._flat[slice(*span)].div_(self._n_hosts)

    def _sum(self, spans: Sequence[Span]) -> None:
        """Over the network, the shares of all hosts."""
        self._network.sum([self._flat[slice(*self.shard(span))] for span in spans], self._rounds)

    def offer(self, collective: Collective) -> None:
        self._inside.offer(collective)

    def accept(self) -> None:
        self._inside.accept()

    def work(self, collective: Collective) -> None:
        self._inside.work(collective)

    def settle(self, collective: Collective) -> None:
        self._inside.settle(collective)
