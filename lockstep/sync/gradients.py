"""The rule `gradients`: gradients are averaged by shard, and each trainer updates its shard for all.

Rank r averages shard r of all gradients, takes the optimizer's step on it, and writes the weights into every
arena. With `factors` it computes its shard of large layers' gradients from all trainers' factors. So N
trainers take exactly the step of one trainer with N times the batch, for every optimizer. The optimizer's
state exists once, divided among the trainers (ZeRO-1: Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.config import Config
from lockstep.config.shares import Bounds, bounds_of
from lockstep.exchange import Op, Span
from lockstep.exchange.transport import MarkedReduction, SharedRows, Transport
from lockstep.exchange.tree import PartialSums
from lockstep.network.arena import Arena
from lockstep.network.factors import Factors
from lockstep.network.optimizer import ShardedUpdater, has_norms, inexact_norms
from lockstep.network.program import Program
from lockstep.sync import Rule, StepBarrier
from lockstep.sync.assembling import assemble
from lockstep.sync.weights import all_reduce_bytes, inexact


class GradientsRule(Rule):
    """Averaged gradients and sharded updates. From its construction on, the program's updates are by shard.

    Args:
        config: The run's.
        transport: Over the arenas of all trainers.
        program: Whose gradients and updates the rule takes over.
    """

    def __init__(self, config: Config, transport: Transport, program: Program) -> None:
        self._arena, self._weights = program.arena, transport
        self._op: Op = "pairwise" if config.logical_ranks else "mean"
        self._gradients, self._updater, self._pieces = program.shard_updates(transport)
        factors = self._gradients.factors
        self._factor_spans = factors.spans if factors else []
        self._transport = transport.another(self._gradients.block, self._gradients.whole)
        self._transport.clock = transport.clock
        self._n_logical, self._bounds = config.logical_ranks or 0, Bounds()
        if config.logical_ranks:
            self._use_bounds(bounds_of(config))
        self._marked: MarkedReduction | None = None
        if config.overlap and not config.logical_ranks and config.unfreeze_epoch is None:
            self._overlap(config)
        self._factors = _Factors(factors, transport) if factors else None
        if config.factors:
            names = ", ".join(layer.name for layer in factors.layers) if factors else ""
            program.warn(f"factors: {names or 'no layer has any smaller than its gradient'}")
        self._norms = _Norms(self._updater, transport, self._arena) if self._updater.needs_norms else None

    def _overlap(self, config: Config) -> None:
        """Have buckets reduced during backward, if the transport can do that."""
        if isinstance(self._transport, MarkedReduction):
            self._marked = self._transport
            self._marked.open_marks(len(self._gradients.buckets))
            self._gradients.when_full = self._marked.mark
        elif config.accumulate == 1:  # else a bucket is full several times a step
            spans = self._in_block(self._gradients.buckets)
            self._gradients.when_full = self._transport.overlapped_reduction(spans, self._op)

    def end_backward(self) -> None:
        self._gradients.complete()

    def update(self, optimizer: ShardedUpdater, step_barrier: StepBarrier | None) -> None:
        assert step_barrier
        if step_barrier.order.bounds not in (self._bounds, ()):
            self._use_bounds(step_barrier.order.bounds)
        if self._factors:
            self._factors.exchange(step_barrier)
        buckets = self._gradients.buckets
        pieces = [piece for piece in self._pieces if piece[0] >= self._arena.n_frozen]
        self._weights.reduce(self._transport, self._in_block(buckets), self._op, step_barrier)
        reduced = self._reduce_marked(self._marked) if self._marked and self._gradients.when_full else set()
        if self._norms:  # these need all gradients before the first step
            for piece in pieces:
                if piece not in reduced:
                    self._reduce(piece)
            reduced = set(pieces)
            self._norms.exchange(step_barrier)
        for piece in pieces:
            if piece not in reduced:
                self._reduce(piece)
            optimizer.step(piece)
            self._weights.scatter_shard(piece)
        self._weights.publish([*self._factor_spans, *buckets], step_barrier)
        optimizer.finish()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state, assembled from the shards of all ranks, and collect its counts."""
        tensors: dict[str, torch.Tensor] = {}
        spans = [*self._factor_spans, *self._gradients.all_buckets]
        with self._checkpoint_block() as (transport, flat):
            for kind, values in self._updater.state.items():
                tensors |= self._arena.views(kind, assemble(transport, spans, flat, values))
        self._collect_counts()
        return tensors

    def state_bytes(self) -> int:
        return len(self._updater.state) * self._arena.n_weights * self._arena.flat.itemsize

    def _collect_counts(self) -> None:
        for counts in self._weights.group.all_gather("the optimizer's counts", self._updater.counts()):
            for key, values in counts.items():
                for number, value in values.items():
                    self._arena.local[key][number] = value

    def promise(self, config: Config, model: nn.Module) -> str:
        if config.logical_ranks and has_norms(model):
            return f"logical_ranks: batch normalisation has the statistics of each of {config.logical_ranks}"
        return inexact("; ".join(inexact_norms(config, model)), config)

    def bytes_per_sync(self) -> int:
        n_bytes = all_reduce_bytes(self._gradients.flat.nbytes, self._weights.group.world.size)
        return n_bytes + (self._factors.n_bytes if self._factors else 0)

    def close(self) -> None:
        for each in (self._norms, self._factors):
            if each:
                each.close()
        self._transport.close()
        self._gradients.block.close()

    def _use_bounds(self, bounds: Bounds) -> None:
        """Complete the tree from the partial sums of this host's trainers, who have these logical ranks."""
        world, self._bounds = self._weights.group.everywhere, bounds
        first = world.host * world.local_size
        here, n_elements = bounds[first : first + world.local_size + 1], len(self._gradients.flat)
        self._transport.use_partial_sums(PartialSums.of_ranges(here, self._n_logical, n_elements))

    def _reduce(self, piece: Span) -> None:
        """Compute the mean of the gradients of a piece of this rank's shards."""
        if piece[0] < self._gradients.shift:
            assert self._factors
            self._factors.make(piece)
        else:
            self._transport.reduce_shard(self._in_block([piece])[0], self._op)
            self._updater.average(piece)

    def _reduce_marked(self, transport: MarkedReduction) -> set[Span]:
        """Reduce all buckets, each as soon as all ranks have marked it. Return their pieces."""
        reduced = set()
        for number, bucket in enumerate(self._gradients.buckets):
            for piece in self._weights.pieces(bucket):
                transport.reduce_marked(number, self._in_block([piece])[0], self._op)
                reduced.add(piece)
        transport.join_marked()
        return reduced

    def _in_block(self, spans: Sequence[Span]) -> list[Span]:
        """Return spans of the arena as spans of the gradients' block."""
        shift = self._gradients.shift
        return [(first - shift, last - shift) for first, last in spans]

    @contextmanager
    def _checkpoint_block(self) -> Iterator[tuple[Transport, torch.Tensor]]:
        """Yield a block laid out as the weights: that of the gradients, or a new one if it begins later."""
        if self._gradients.shift == 0:
            yield self._transport, self._gradients.flat
            return
        n_elements, dtype = self._arena.n_exchanged, self._arena.flat.dtype
        block = self._arena.memory.allocate(
            n_elements * dtype.itemsize, "a checkpoint of the optimizer's state"
        )
        flat = block.tensor(dtype, (n_elements,))
        transport = self._weights.another(block, flat)
        yield transport, flat
        transport.close()
        block.close()


class _Factors:
    """A table of all trainers' factors, exchanged before each trainer computes its rows of the products.

    n_bytes: Read and written remotely in a step, with the weights that are updated from the products.
    """

    def __init__(self, factors: Factors, transport: Transport) -> None:
        self._factors, world = factors, transport.group.world
        self._transport = transport.another(factors.block, factors.table.view(-1))
        self._transport.clock = transport.clock
        self.make = factors.make
        weights = sum(last - first for first, last in factors.spans) * factors.table.itemsize
        self.n_bytes = (world.size - 1) * (factors.table[0].nbytes + weights // world.size)

    def exchange(self, step_barrier: StepBarrier) -> None:
        """Exchange the factors, after backward."""
        self._transport.exchange_rows_of_hosts(step_barrier)
        self._factors.collect()

    def close(self) -> None:
        """Close the table."""
        self._transport.close()
        self._factors.block.close()


class _Norms:
    """Sums of squares by tensor: a table with a row for each rank, which all ranks exchange."""

    def __init__(self, updater: ShardedUpdater, transport: Transport, arena: Arena) -> None:
        self._updater = updater
        self._table = SharedRows(transport, arena.memory, updater.n_norms, arena.flat.dtype, "norms")

    def exchange(self, step_barrier: StepBarrier) -> None:
        """Exchange the norms, between the reduction of the gradients and the step."""
        self._table.exchange(self._updater.norms(), step_barrier)
        self._updater.use_norms(self._table.rows(self._updater.n_norms))

    def close(self) -> None:
        """Close the table."""
        self._table.close()
