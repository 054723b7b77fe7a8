"""The optimizer of a network and its steps, with its state in the arena."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.errors import UserError
from lockstep.network.arena import Arena
from lockstep.network.low_precision import LowPrecisionWeights
from lockstep.optim import OPTIMIZERS, args_of
from lockstep.optim.contract import StateStorage
from lockstep.optim.fused import Fused, FusedSGD

Stepper = torch.optim.Optimizer | Fused


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
        low_precision: LowPrecisionWeights | None = None,
        rate_scales: Mapping[str, float] = MappingProxyType({}),
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
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, self._config.clip_norm)
        self.inner.step()
        if self.low_precision:
            self._step_low_precision(self.low_precision)
        self.inner.zero_grad()
        if self._config.ema_decay is not None:
            self._arena.move_averages(self._config.ema_decay)

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
    rate_scales: Mapping[str, float] = MappingProxyType({}),
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
