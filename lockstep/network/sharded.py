"""The optimizer's step on one shard of the weights, with gradients laid out as the weights.

Each rank has the optimizer state of its own shard only. A shard begins and ends anywhere in a tensor, and an
optimizer's update is elementwise apart from the norms of whole tensors. So the optimizer steps on pieces:
one-dimensional views of the part of each tensor that lies in a span.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lockstep.config import Config
from lockstep.exchange import Span
from lockstep.network.arena import Arena
from lockstep.network.gradients import Gradients
from lockstep.network.low_precision import LowPrecisionWeights
from lockstep.network.optimizer import Stepper, make_optimizer_of, set_learning_rate
from lockstep.optim import OPTIMIZERS

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in a span, as one-dimensional views.

    Attributes:
        number: Number of the parameter among the trained ones.
    """

    name: str
    number: int
    weight: torch.Tensor
    gradient: torch.Tensor


class _PieceStates:
    """The optimizer state of a span's pieces, in the form that Optimizer.bind takes."""

    def __init__(self, states: dict[str, dict[str, torch.Tensor]], flat: torch.Tensor) -> None:
        self._states, self.flat = states, flat
        self.local: dict[str, torch.Tensor] = {}

    def state_of(self, kind: str, parameter_name: str) -> torch.Tensor:
        return self._states[kind][parameter_name]


@dataclass(frozen=True)
class _SpanStep:
    """The optimizer of one span's pieces."""

    optimizer: Stepper
    places: _PieceStates
    pieces: list[Piece]


def needs_norms(config: Config) -> bool:
    """Return whether a step needs norms of whole tensors."""
    return config.clip_norm is not None or OPTIMIZERS[config.optimizer].needs_norms


class ShardedUpdater:
    """The optimizer's steps on this rank's shards.

    Args:
        spans: Spans of the arena that this rank updates; later calls name these.
        rate_scales: The factor of the learning rate of each parameter, by name; 1 for others.

    Attributes:
        state: Kind of state to span to (elements,), on the network's device, taken over from
            arena.host_states.
        n_norms: Numbers in a row of norms.
        low_precision: The weights' bfloat16 copies, which are stale after a step, or None.
    """

    def __init__(
        self,
        arena: Arena,
        gradients: Gradients,
        config: Config,
        spans: list[Span],
        low_precision: LowPrecisionWeights | None = None,
        rate_scales: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._arena, self._gradients, self._config = arena, gradients, config
        self.low_precision, self._rate_scales = low_precision, rate_scales
        self._names = list(gradients.trained)
        self._wide = [value.dim() > 1 for value in gradients.trained.values()]
        self.state = {
            kind: {
                (first, last): flat[first:last].to(arena.flat.device).clone()
                for first, last in spans
                if first < arena.n_weights
            }
            for kind, flat in arena.host_states.items()
        }
        arena.host_states.clear()
        self.dtype = arena.flat.dtype
        self.learning_rate = config.learning_rate
        self._steps = {span: self._make(span) for span in spans}
        self.needs_norms = needs_norms(config)
        self.n_norms = 2 * len(self._names)

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next steps."""
        self.learning_rate = rate
        for each in self._steps.values():
            if each:
                set_learning_rate(each.optimizer, rate)

    def average(self, span: Span) -> None:
        """Divide a sum over logical ranks by their number; otherwise the span holds the mean already."""
        if self._config.logical_ranks:
            self._gradients.of(span).mul_(1 / self._config.logical_ranks)

    def step(self, span: Span) -> None:
        """Take the step of one span from its mean gradients, and set the buffers in it to their mean."""
        each = self._steps[span]
        if each:
            each.optimizer.step()
        first, last = self._arena.trained_buffers_span
        first, last = max(first, span[0]), min(last, span[1])
        if first < last:
            self._arena.flat[first:last].copy_(self._gradients.of((first, last)))

    def finish(self) -> None:
        """Finish a step once all weights are written: update moving averages, release gradients."""
        self._gradients.clear()
        if self.low_precision:
            self.low_precision.stale = True
        if self._config.ema_decay is not None:
            self._arena.move_averages(self._config.ema_decay)

    def norms(self) -> torch.Tensor:
        """Return this shard's sums of squares of each gradient, then of each weight: float64 (n_norms,)."""
        sums = self._arena.flat.new_zeros((2, len(self._names)), dtype=torch.float64)
        for piece in self._pieces():
            sums[0, piece.number] += piece.gradient.double().square().sum()
            sums[1, piece.number] += piece.weight.double().square().sum()
        return sums.view(-1)

    def use_norms(self, rows: torch.Tensor) -> None:
        """Clip the gradients, and give the optimizer the norms of whole tensors.

        Args:
            rows: The `norms` of all ranks, (rank, n_norms).
        """
        total = rows[0].clone()
        for row in rows[1:]:  # in rank order, so that all ranks have the same bits
            total += row
        squares, weights = total.view(2, -1)
        factor = total.new_ones(())
        if self._config.clip_norm is not None:
            factor = (self._config.clip_norm / (squares.sum().sqrt() + _TINY)).clamp(max=1.0)
            for piece in self._pieces():
                piece.gradient.mul_(factor.to(piece.gradient.dtype))
        sizes = (squares.sqrt() * factor, weights.sqrt())
        for each in self._steps.values():
            if each:
                norms = {
                    piece.weight: (sizes[0][piece.number], sizes[1][piece.number])
                    for piece in each.pieces
                    if self._wide[piece.number]
                }
                for group in each.optimizer.param_groups:
                    group["norms"] = norms

    def counts(self) -> dict[str, dict[int, float]]:
        """Return the optimizer's step counts in this shard: kind to parameter number to count."""
        counts: dict[str, dict[int, float]] = {}
        for each in filter(None, self._steps.values()):
            for key, values in each.places.local.items():
                for piece, value in zip(each.pieces, values.tolist(), strict=True):
                    counts.setdefault(key, {})[piece.number] = value
        return counts

    def _pieces(self) -> Iterable[Piece]:
        for each in self._steps.values():
            yield from each.pieces if each else ()

    def _make(self, span: Span) -> _SpanStep | None:
        """Return the optimizer of a span's pieces, or None if nothing in the span is trained."""
        pieces = []
        states: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in self.state}
        gradients = self._gradients.of(span)
        for number, name in enumerate(self._names):
            first, last = self._arena.span_of(name)
            first, last = max(first, span[0]), min(last, span[1])
            if first < last:
                weight, within = self._arena.flat[first:last], slice(first - span[0], last - span[0])
                weight.grad = gradients[within]
                pieces.append(Piece(name, number, weight, weight.grad))
                for kind, values in self.state.items():
                    states[kind][name] = values[span][within]
        if not pieces:
            return None
        places = _PieceStates(states, self._arena.flat)
        named = [(piece.name, piece.weight) for piece in pieces]
        optimizer = make_optimizer_of(named, places, self._config, self._rate_scales)
        for key, counts in places.local.items():
            counts.copy_(self._arena.local[key][[piece.number for piece in pieces]])
        return _SpanStep(optimizer, places, pieces)
