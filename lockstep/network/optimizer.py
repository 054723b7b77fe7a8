"""Makes the optimizer of a network, with its state in the arena."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.network.arena import Arena
from lockstep.optim import OPTIMIZERS, args_of
from lockstep.optim.contract import Places
from lockstep.optim.fused import Fused

Stepper = torch.optim.Optimizer | Fused


def make_optimizer(model: nn.Module, arena: Arena, config: Config) -> Stepper:
    """`config.optimizer` with the arena's tensors as its state, at the rate of the configuration.

    Biases do not decay, as in cuda-convnet, Caffe and theano_alexnet. Raises UserError where there is nothing
    to train.
    """
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not named:
        raise UserError("the model has no parameters that are trained (requires_grad)")
    return make_optimizer_of(named, arena, config)


def make_optimizer_of(named: Sequence[tuple[str, torch.Tensor]], places: Places, config: Config) -> Stepper:
    """The same for tensors and the names by which `places` knows their state."""
    args = args_of(config)
    groups = _groups(named, config.weight_decay, args.pop("bias_rate"))
    kind = OPTIMIZERS[config.optimizer]
    optimizer = kind.make(groups, config, args)
    kind.bind(optimizer, named, places, config)
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def set_learning_rate(optimizer: Stepper, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def inexact_parts(config: Config, model: nn.Module) -> list[str]:
    """What makes N trainers differ from one with N times the batch, by more than rounding; for people."""
    parts = []
    if OPTIMIZERS[config.optimizer].inexact:
        parts.append(OPTIMIZERS[config.optimizer].inexact)
    if config.clip_norm is not None:
        parts.append("clip_norm clips each trainer's own gradient")
    return parts + inexact_norms(config, model)


def has_norms(model: nn.Module) -> bool:
    """Whether there is batch normalisation."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def inexact_norms(config: Config, model: nn.Module) -> list[str]:
    """The same, as far as it is the network's. With `parts` one trainer has the same statistics as many."""
    if not has_norms(model) or config.sync_batch_norm or config.parts:
        return []
    text = "batch normalisation has the statistics of each trainer's own pictures"
    return [f"{text} (sync_batch_norm: true gives it those of all)"]


def _groups(
    named: Sequence[tuple[str, torch.Tensor]], weight_decay: float, bias_rate: float
) -> list[dict[str, Any]]:
    """Weights, and biases, which do not decay and have a rate of their own."""
    biases = [parameter for name, parameter in named if name.split(".")[-1] == "bias"]
    weights = [parameter for name, parameter in named if name.split(".")[-1] != "bias"]
    groups = [
        {"params": weights, "weight_decay": weight_decay, "rate_scale": 1.0},
        {"params": biases, "weight_decay": 0.0, "rate_scale": bias_rate},
    ]
    return [group for group in groups if group["params"]]
