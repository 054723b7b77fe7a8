"""The rule `gradients`: gradients are averaged by shard, and each trainer updates its shard for all.

Rank r averages shard r of all gradients, takes the optimizer's step on it, and writes the weights into every
arena. So N trainers take the very step that one with N times the batch takes, whatever the optimizer; its
state exists once, divided among the trainers (ZeRO-1: Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
"""

import torch
from torch import nn

from lockstep.config import Config
from lockstep.exchange import Op, Span
from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
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
        self._arena, self._weights = program.arena, transport
        self._op: Op = "pairwise" if config.parts else "mean"
        self._span = 0, program.arena.n_exchanged
        self._gradients, self._updater = program.shard_updates(memory, transport.pieces(self._span))
        self._transport = transport.another(self._gradients.block, self._gradients.flat)
        self._transport.clock = transport.clock
        self._norms = _Norms(self._updater, transport, memory) if self._updater.needs_norms else None

    def _step(self, piece: Span) -> None:
        self._updater.average(piece)
        self._updater.step(piece)

    def end_backward(self) -> None:
        self._gradients.complete()

    def update(self, optimizer: ShardedUpdater, meeting: Meeting | None) -> None:
        assert meeting
        if self._norms is None:
            self._weights.update(self._transport, self._span, self._op, self._step, meeting.barrier)
        else:
            pieces = self._weights.pieces(self._span)
            self._weights.reduce(self._transport, self._span, self._op, meeting.barrier)
            for piece in pieces:
                self._transport.fold(piece, self._op)
                optimizer.average(piece)
            self._norms.exchange(meeting)
            for piece in pieces:
                optimizer.step(piece)
                self._weights.spread(piece)
            self._weights.publish(self._span, meeting.barrier)
        optimizer.finish()

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's, assembled: the block of the gradients is free between steps."""
        found: dict[str, torch.Tensor] = {}
        for kind, values in self._updater.state.items():
            flat = assemble(self._transport, self._span, self._gradients.flat, self._updater.first, values)
            found |= self._arena.views(kind, flat)
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
        return all_reduce_bytes(self._gradients.flat.nbytes, self._weights.group.world.size)

    def close(self) -> None:
        if self._norms:
            self._norms.close()
        self._transport.close()
        self._gradients.block.close()


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
