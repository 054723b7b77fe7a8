"""The optimizer's step on one shard of the weights, with gradients that lie as the weights do.

Each rank has the optimizer's state of its own shard and no other. A shard begins and ends anywhere in a
tensor, and an optimizer's update is elementwise but for the norms of whole tensors; so it steps on pieces:
one-dimensional views of what of each tensor lies in a span.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lockstep.config import Config
from lockstep.exchange import Span
from lockstep.network.arena import Arena
from lockstep.network.gradients import Gradients
from lockstep.network.optimizer import Stepper, make_optimizer_of, set_learning_rate
from lockstep.network.working import WorkingWeights
from lockstep.optim import OPTIMIZERS

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Piece:
    """What of one parameter lies in a span, one-dimensional views. number: of the parameter."""

    name: str
    number: int
    weight: torch.Tensor
    gradient: torch.Tensor


class _Places:
    """Where an optimizer finds the state of its pieces; for Optimizer.bind, as an arena."""

    def __init__(self, states: dict[str, dict[str, torch.Tensor]], flat: torch.Tensor) -> None:
        self._states, self.flat = states, flat
        self.local: dict[str, torch.Tensor] = {}

    def state_of(self, kind: str, parameter_name: str) -> torch.Tensor:
        return self._states[kind][parameter_name]


class _SpanStep:
    """The optimizer of one span's pieces."""

    def __init__(self, optimizer: Stepper, places: _Places, pieces: list[Piece]) -> None:
        self.optimizer, self.places, self.pieces = optimizer, places, pieces


def needs_norms(config: Config) -> bool:
    """Whether a step needs norms of whole tensors."""
    return config.clip_norm is not None or OPTIMIZERS[config.optimizer].needs_norms


class ShardedUpdater:
    """spans: the pieces of the arena that this rank updates, the spans of later calls.

    state: by kind and span, (elements,), on the network's device. It takes over what arena.apart has.
    n_norms: numbers in a row of norms. working: the weights' bfloat16 copies, stale after a step.
    """

    def __init__(
        self,
        arena: Arena,
        gradients: Gradients,
        config: Config,
        spans: list[Span],
        working: WorkingWeights | None = None,
    ) -> None:
        self._arena, self._gradients, self._config = arena, gradients, config
        self.working = working
        self._names = list(gradients.trained)
        self._wide = [value.dim() > 1 for value in gradients.trained.values()]
        self.state = {
            kind: {
                (first, last): flat[first:last].to(arena.flat.device).clone()
                for first, last in spans
                if first < arena.n_weights
            }
            for kind, flat in arena.apart.items()
        }
        arena.apart.clear()
        self.dtype = arena.flat.dtype
        self.learning_rate = config.learning_rate
        self._steps = {span: self._make(span) for span in spans}
        self.needs_norms = needs_norms(config)
        self.n_norms = 2 * len(self._names)

    def set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate
        for each in self._steps.values():
            if each:
                set_learning_rate(each.optimizer, rate)

    def average(self, span: Span) -> None:
        """Makes the sum of all parts their mean; without parts a span holds the mean already."""
        if self._config.parts:
            self._gradients.of(span).mul_(1 / self._config.parts)

    def step(self, span: Span) -> None:
        """Takes the step of one span, whose gradients are the mean's; buffers become their mean."""
        each = self._steps[span]
        if each:
            each.optimizer.step()
        first, last = self._arena.buffers_span
        first, last = max(first, span[0]), min(last, span[1])
        if first < last:
            self._arena.flat[first:last].copy_(self._gradients.of((first, last)))

    def finish(self) -> None:
        """When all weights are there: moves the averages, and lets go of the gradients."""
        self._gradients.clear()
        if self.working:
            self.working.stale = True
        if self._config.ema_decay is not None:
            self._arena.move_averages(self._config.ema_decay)

    def norms(self) -> torch.Tensor:
        """Sums of squares of this shard's part of each gradient, then of each weight: float64 (n_norms,)."""
        sums = self._arena.flat.new_zeros((2, len(self._names)), dtype=torch.float64)
        for piece in self._pieces():
            sums[0, piece.number] += piece.gradient.double().square().sum()
            sums[1, piece.number] += piece.weight.double().square().sum()
        return sums.view(-1)

    def use_norms(self, rows: torch.Tensor) -> None:
        """Clips, and tells the optimizer the norms of whole tensors. rows: of all ranks, (rank, n_norms)."""
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
        """What of the optimizer's counts this rank knows: of the parameters that its shard has a part of."""
        found: dict[str, dict[int, float]] = {}
        for each in filter(None, self._steps.values()):
            for key, values in each.places.local.items():
                for piece, value in zip(each.pieces, values.tolist(), strict=True):
                    found.setdefault(key, {})[piece.number] = value
        return found

    def _pieces(self) -> Iterable[Piece]:
        for each in self._steps.values():
            yield from each.pieces if each else ()

    def _make(self, span: Span) -> _SpanStep | None:
        """The optimizer of what lies in a span, None where nothing does that is trained."""
        pieces = []
        states: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in self.state}
        gradients = self._gradients.of(span)
        for number, name in enumerate(self._names):
            first, last = self._arena.span_of(name)
            first, last = max(first, span[0]), min(last, span[1])
            if first < last:
                weight, here = self._arena.flat[first:last], slice(first - span[0], last - span[0])
                weight.grad = gradients[here]
                pieces.append(Piece(name, number, weight, weight.grad))
                for kind, values in self.state.items():
                    states[kind][name] = values[span][here]
        if not pieces:
            return None
        places = _Places(states, self._arena.flat)
        named = [(piece.name, piece.weight) for piece in pieces]
        optimizer = make_optimizer_of(named, places, self._config)
        for key, counts in places.local.items():
            counts.copy_(self._arena.local[key][[piece.number for piece in pieces]])
        return _SpanStep(optimizer, places, pieces)
