"""The rule `gradients`: gradients are averaged by shard, and each trainer updates its shard for all.

Rank r averages shard r of all gradients, takes the optimizer's step on it, and writes the weights into every
arena. With `factors` it makes its shard of large layers' gradients itself, of everyone's factors. So N
trainers take the very step that one with N times the batch takes, whatever the optimizer; its state exists
once, divided among the trainers (ZeRO-1: Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.config import Config
from lockstep.exchange import Op, Span
from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
from lockstep.network.factors import Factors
from lockstep.network.optimizer import has_norms, inexact_norms
from lockstep.network.program import Program
from lockstep.network.sharded import ShardedUpdater
from lockstep.network.shared_rows import SharedRows
from lockstep.sync import Meeting, Rule
from lockstep.sync.assembling import assemble
from lockstep.sync.weights import all_reduce_bytes, inexact


class Gradients(Rule):
    """transport: over the arenas of all trainers. From here on the program's updates are by shard."""

    def __init__(self, config: Config, transport: Transport, program: Program, memory: Memory) -> None:
        self._arena, self._weights, self._memory = program.arena, transport, memory
        self._op: Op = "pairwise" if config.parts else "mean"
        self._gradients, self._updater, self._pieces = program.shard_updates(memory, transport)
        self._buckets, factors = self._gradients.buckets, self._gradients.factors
        self._spans = [*(factors.spans if factors else ()), *self._buckets]
        block, flat = self._gradients.block, self._gradients.flat
        self._transport = transport.another(block, flat)
        self._transport.clock = transport.clock
        if config.overlap and transport.overlaps and not config.parts:
            self._transport.open_marks(len(self._buckets))
            self._gradients.when_full = self._transport.mark
        elif config.overlap and not config.parts and config.accumulate == 1:  # each bucket is full but once
            self._gradients.when_full = self._transport.sum_early(self._in_block(self._buckets), self._op)
        self._factors = _Factors(factors, transport) if factors else None
        if config.factors:
            names = ", ".join(layer.name for layer in factors.layers) if factors else ""
            program.tell(f"factors: {names or 'no layer has any smaller than its gradient'}")
        self._norms = _Norms(self._updater, transport, memory) if self._updater.needs_norms else None

    def end_backward(self) -> None:
        self._gradients.complete()

    def update(self, optimizer: ShardedUpdater, meeting: Meeting | None) -> None:
        assert meeting
        if self._factors:
            self._factors.exchange(meeting)
        self._weights.reduce(self._transport, self._in_block(self._buckets), self._op, meeting.barrier)
        made = self._fold_beside() if self._transport.overlaps and self._gradients.when_full else set()
        if self._norms:
            made |= self._make(self._pieces, made)
            self._norms.exchange(meeting)
        for piece in self._pieces:
            self._make([piece], made)
            optimizer.step(piece)
            self._weights.spread(piece)
        self._weights.publish(self._spans, meeting.barrier)
        optimizer.finish()

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's, assembled."""
        found: dict[str, torch.Tensor] = {}
        with self._room() as (transport, flat):
            for kind, values in self._updater.state.items():
                found |= self._arena.views(kind, assemble(transport, self._spans, flat, values))
        for counts in self._weights.group.all_gather("the optimizer's counts", self._updater.counts()):
            for key, values in counts.items():
                for number, value in values.items():
                    self._arena.local[key][number] = value  # which a checkpoint has from there
        return found

    def promise(self, config: Config, model: nn.Module) -> str:
        if config.parts and has_norms(model):
            return (
                f"parts: batch normalisation has the statistics of each of the {config.parts} parts' pictures"
            )
        return inexact("; ".join(inexact_norms(config, model)), config)

    def bytes_per_meeting(self) -> int:
        n_bytes = all_reduce_bytes(self._gradients.flat.nbytes, self._weights.group.world.size)
        return n_bytes + (self._factors.n_bytes if self._factors else 0)

    def close(self) -> None:
        for each in (self._norms, self._factors):
            if each:
                each.close()
        self._transport.close()
        self._gradients.block.close()

    def _make(self, pieces: list[Span], made: set[Span]) -> set[Span]:
        """The means of the gradients of those pieces that are not made yet. Returns the pieces."""
        for piece in pieces:
            if piece in made:
                continue
            if piece[0] < self._gradients.shift:
                assert self._factors
                self._factors.make(piece)
            else:
                self._transport.fold(self._in_block([piece])[0], self._op)
                self._updater.average(piece)
        return set(pieces)

    def _fold_beside(self) -> set[Span]:
        """Folds all buckets, each from when its gradients are there in all ranks. Returns their pieces."""
        found = set()
        for number, bucket in enumerate(self._buckets):
            for piece in self._weights.pieces(bucket):
                self._transport.fold_marked(number, self._in_block([piece])[0], self._op)
                found.add(piece)
        self._transport.join()
        return found

    def _in_block(self, spans: Sequence[Span]) -> list[Span]:
        """Spans of the arena, as those of the block of the gradients."""
        shift = self._gradients.shift
        return [(first - shift, last - shift) for first, last in spans]

    @contextmanager
    def _room(self) -> Iterator[tuple[Transport, torch.Tensor]]:
        """A block laid out as the weights: between steps that of the gradients, where it has them all."""
        if not self._factors:
            yield self._transport, self._gradients.flat
            return
        n_elements, dtype = self._arena.n_exchanged, self._arena.flat.dtype
        block = self._memory.allocate(n_elements * dtype.itemsize, "a checkpoint of the optimizer's state")
        flat = block.tensor(dtype, (n_elements,))
        transport = self._weights.another(block, flat)
        yield transport, flat
        transport.close()
        block.close()


class _Factors:
    """A table of all trainers' factors, shown to all before they make their rows of products.

    n_bytes: what comes and goes in a step, the weights that are updated from it included.
    """

    def __init__(self, factors: Factors, transport: Transport) -> None:
        self._factors, world = factors, transport.group.world
        self._transport = transport.another(factors.block, factors.table.view(-1))
        self._transport.clock = transport.clock
        self.make = factors.make
        weights = sum(last - first for first, last in factors.spans) * factors.table.itemsize
        self.n_bytes = (world.size - 1) * (factors.table[0].nbytes + weights // world.size)

    def exchange(self, meeting: Meeting) -> None:
        """At the end of backward."""
        self._transport.exchange_rows_of_hosts(meeting.barrier)
        self._factors.collect()

    def close(self) -> None:
        self._transport.close()
        self._factors.block.close()


class _Norms:
    """Sums of squares by tensor, shown to all: a table with a row for each rank."""

    def __init__(self, updater: ShardedUpdater, transport: Transport, memory: Memory) -> None:
        self._updater = updater
        self._table = SharedRows(transport, memory, updater.n_norms, updater.dtype, "norms")
        self._table.use_clock(transport.clock)

    def exchange(self, meeting: Meeting) -> None:
        """Between the fold of the gradients and the step."""
        self._table.exchange(self._updater.norms(), meeting.barrier)
        self._updater.use_norms(self._table.rows(self._updater.n_norms))

    def close(self) -> None:
        self._table.close()
