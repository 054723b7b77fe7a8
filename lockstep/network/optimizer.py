"""The optimizer of a network and its steps, of all weights or of one shard of them.

`Updater` steps all weights, with the optimizer's state in the arena. With `ShardedUpdater` each rank has the
state of its own shard only, and steps that one. A shard begins and ends anywhere in a tensor, and an
optimizer's update is elementwise apart from the norms of whole tensors. So the optimizer steps on pieces:
one-dimensional views of the part of each tensor that lies in a span.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.errors import UserError
from lockstep.exchange import Span
from lockstep.network.arena import Arena
from lockstep.network.gradients import Gradients
from lockstep.network.low_precision import LowPrecisionWeights
from lockstep.optim import OPTIMIZERS, args_of
from lockstep.optim.contract import StateStorage
from lockstep.optim.fused import Fused, FusedSGD

Stepper = torch.optim.Optimizer | Fused
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Updater:
    """The optimizer that the configuration names, with its state in the arena, and the moving averages.

    Attributes:
        low_precision: The weights' bfloat16 copies, or None. SGD writes them in its step unless trainers
            average weights afterwards; then, and after any other optimizer's step, they are stale.
    """

    def __init__(
        self,
        model: nn.Module,
        arena: Arena,
        config: Config,
        low_precision: LowPrecisionWeights | None,
        rate_scales: Mapping[str, float],
    ) -> None:
        self._model, self._arena, self._config, self.low_precision = model, arena, config, low_precision
        self.inner = make_optimizer(model, arena, config, rate_scales)
        if low_precision:
            low_precision.keeps_gradients = type(self.inner) is FusedSGD and config.clip_norm is None
            low_precision.averaged = config.n_trainers > 1 or rule_of(config) != "weights"
        self.learning_rate = config.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next steps."""
        self.learning_rate = rate
        set_learning_rate(self.inner, rate)

    def step(self) -> None:
        """Take the step, update the moving averages, and release the gradients.

        A parameter without a gradient counts as one with a gradient of zeros, as in a trainer without images:
        its weight decays and its momentum carries on, alike in all trainers.
        """
        retained = self.low_precision.gradients if self.low_precision else {}
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None and parameter not in retained:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None and parameter in retained:  # not only its layer uses it
                parameter.grad.add_(retained.pop(parameter))
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():  # a user's hook has put it
                parameter.grad = torch.empty_like(parameter).copy_(gradient)  # fused steps take one layout
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, self._config.clip_norm)
        self.inner.step()
        if self.low_precision:
            self._step_low_precision(self.low_precision)
        self.inner.zero_grad()
        if self._config.ema_decay is not None:
            self._arena.move_averages(self._config.ema_decay)

    def check_bound(self) -> None:
        """Check that the optimizer's state is still the arena's (as in `ShardedUpdater`)."""
        stepped = {parameter for group in self.inner.param_groups for parameter in group["params"]}
        names = [name for name, parameter in self._model.named_parameters() if parameter in stepped]
        _check_state(self.inner, names, self._arena, self._config)

    def _step_low_precision(self, low_precision: LowPrecisionWeights) -> None:
        """Take the step of the weights whose gradients were retained in bfloat16."""
        low_precision.stale = True
        if low_precision.gradients:
            assert type(self.inner) is FusedSGD
            low_precision.step(self.inner)


def make_optimizer(
    model: nn.Module, arena: Arena, config: Config, rate_scales: Mapping[str, float] = MappingProxyType({})
) -> Stepper:
    """Return `config.optimizer` with the arena's tensors as its state, at the configuration's learning rate.

    Biases do not decay, as in cuda-convnet, Caffe and theano_alexnet.

    Raises:
        UserError: No parameter is trained.
    """
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not named:
        raise UserError("the model has no parameters that are trained (requires_grad)")
    return make_optimizer_of(named, arena, config, rate_scales)


def make_optimizer_of(
    named: Sequence[tuple[str, torch.Tensor]],
    places: StateStorage,
    config: Config,
    rate_scales: Mapping[str, float],
) -> Stepper:
    """Return the optimizer of these (name, tensor) pairs, whose state `places` knows by name.

    Args:
        rate_scales: The factor of the learning rate by name; 1 for others.
    """
    args = args_of(config)
    groups = _groups(named, config.weight_decay, args.pop("bias_rate"), rate_scales)
    kind = OPTIMIZERS[config.optimizer]
    optimizer = kind.make(groups, config, args)
    kind.bind(optimizer, named, places, config)
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def _check_state(optimizer: Stepper, names: Iterable[str], places: StateStorage, config: Config) -> None:
    """Check that the optimizer still has the tensors that its state was bound to.

    Raises:
        UserError: A step has put another tensor in a place of one, which is neither averaged nor saved.
    """
    kept = set(_addresses(optimizer.state))
    for kind, name in itertools.product(OPTIMIZERS[config.optimizer].states(config), names):
        tensor = places.state_of(kind, name)
        if tensor.numel() and tensor.data_ptr() not in kept:
            raise UserError(
                f"optimizer: {config.optimizer}: its state has lost the tensor of {kind} that it got for "
                f"{name}, so what it has instead is neither averaged nor saved. Change state in place "
                "(mul_, add_)."
            )


def _addresses(state: Any) -> Iterator[int]:
    """Yield the addresses of the tensors in nested mappings and sequences."""
    if isinstance(state, torch.Tensor):
        yield state.data_ptr()
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _addresses(value)


def set_learning_rate(optimizer: Stepper, rate: float) -> None:
    """Set the rate of every parameter group, scaled by the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def inexact_parts(config: Config, model: nn.Module) -> list[str]:
    """Return reasons why N trainers differ, beyond rounding, from one with N times the batch."""
    parts = []
    if OPTIMIZERS[config.optimizer].inexact:
        parts.append(OPTIMIZERS[config.optimizer].inexact)
    if config.clip_norm is not None:
        parts.append("clip_norm clips each trainer's own gradient")
    return parts + inexact_norms(config, model)


def has_norms(model: nn.Module) -> bool:
    """Return whether the model has batch normalisation."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def inexact_norms(config: Config, model: nn.Module) -> list[str]:
    """Return the reasons that lie in the network; with `logical_ranks` there are none."""
    if not has_norms(model) or config.sync_batch_norm or config.logical_ranks:
        return []
    text = "batch normalisation has the statistics of each trainer's own images"
    return [f"{text} (sync_batch_norm: true gives it those of all)"]


def _groups(
    named: Sequence[tuple[str, torch.Tensor]],
    weight_decay: float,
    bias_rate: float,
    rate_scales: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return torch's groups: weights, then biases, which do not decay, each by factor of the rate."""
    members: dict[tuple[bool, float], list[torch.Tensor]] = {}
    for name, parameter in named:
        is_bias = name.split(".")[-1] == "bias"
        members.setdefault((is_bias, rate_scales.get(name, 1.0)), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_bias else weight_decay,
            "rate_scale": factor * (bias_rate if is_bias else 1.0),
        }
        for (is_bias, factor), parameters in sorted(members.items(), key=lambda item: item[0])
    ]


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
        low_precision: LowPrecisionWeights | None,
        rate_scales: Mapping[str, float],
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
            for piece in each.pieces:  # each time: an optimizer may give them other gradients in its step
                piece.weight.grad = piece.gradient
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

    def check_bound(self) -> None:
        """Check that the optimizer still updates the arena's tensors, and that its state is still bound.

        Raises:
            UserError: A step has given a parameter another tensor, so the network would not learn, or has
                replaced a tensor of the state.
        """
        memory = self._arena.flat.untyped_storage().data_ptr()
        for piece in self._pieces():
            if piece.weight.untyped_storage().data_ptr() != memory:
                raise UserError(
                    f"optimizer: {self._config.optimizer}: its step has replaced {piece.name} by another "
                    "tensor, so the network does not learn. Change it in place (sub_, add_)."
                )
        for each in filter(None, self._steps.values()):
            _check_state(each.optimizer, [piece.name for piece in each.pieces], each.places, self._config)

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
                pieces.append(Piece(name, number, weight, gradients[within]))
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
