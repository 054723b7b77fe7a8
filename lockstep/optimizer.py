"""The optimizers, with their state in the arena: SGD as theano_alexnet does it, AdamW, LARS."""

from typing import Any

import torch
from torch import nn

from lockstep.arena import Arena
from lockstep.checks import optimizer_args
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.lars import LARS
from lockstep.sgd import SGD

Optimizer = torch.optim.Optimizer | SGD
_STEPS = "steps"  # AdamW's count of steps, once for each parameter


def momentum_of(config: Config) -> float:
    return config.momentum if config.use_momentum else 0.0


def states_of(config: Config) -> tuple[str, ...]:
    """What the optimizer keeps of every parameter, by its name in the arena."""
    if config.optimizer == "adamw":
        return "exp_avg", "exp_avg_sq"
    return ("momenta",) if momentum_of(config) else ()


def make_optimizer(model: nn.Module, arena: Arena, config: Config) -> Optimizer:
    """`config.optimizer` with the arena's tensors as its state, at the rate of the configuration.

    torch keeps v = m v + g and steps by the rate times v; theano_alexnet keeps v = m v - rate g. They are
    the same as long as the rate stays; when it falls, torch's step falls with it at once. With SGD, biases
    learn twice as fast and do not decay, as in cuda-convnet, Caffe and theano_alexnet. AdamW: Loshchilov and
    Hutter 2019, arXiv 1711.05101, which decays weights by the rate times weight_decay. Raises UserError
    where there is nothing to train.
    """
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not named:
        raise UserError("the model has no parameters that are trained (requires_grad)")
    args = optimizer_args(config)
    groups = _groups(named, config.weight_decay, args.pop("bias_rate"))
    optimizer = _make(groups, config, args)
    set_learning_rate(optimizer, config.learning_rate)
    if config.optimizer == "adamw":
        arena.local[_STEPS] = torch.zeros(len(named), device=arena.flat.device)
        for (name, parameter), step in zip(named, arena.local[_STEPS], strict=True):
            averages = {kind: arena.state_of(kind, name) for kind in states_of(config)}
            optimizer.state[parameter] = {"step": step, **averages}
    elif momentum_of(config):
        for name, parameter in named:
            optimizer.state[parameter]["momentum_buffer"] = arena.state_of("momenta", name)
    return optimizer


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def inexact_parts(config: Config, model: nn.Module) -> list[str]:
    """What makes N trainers differ from one with N times the batch, by more than rounding; for people."""
    parts = []
    if config.optimizer != "sgd":
        parts.append(f"{config.optimizer}'s update is not linear in the gradient")
    if config.clip_norm is not None:
        parts.append("clip_norm clips each trainer's own gradient")
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        parts.append("batch normalisation has the statistics of each trainer's own pictures")
    return parts


def _groups(
    named: list[tuple[str, nn.Parameter]], weight_decay: float, bias_rate: float
) -> list[dict[str, Any]]:
    """Weights, and biases, which do not decay and have a rate of their own."""
    biases = [parameter for name, parameter in named if name.split(".")[-1] == "bias"]
    weights = [parameter for name, parameter in named if name.split(".")[-1] != "bias"]
    groups = [
        {"params": weights, "weight_decay": weight_decay, "rate_scale": 1.0},
        {"params": biases, "weight_decay": 0.0, "rate_scale": bias_rate},
    ]
    return [group for group in groups if group["params"]]


def _make(groups: list[dict[str, Any]], config: Config, args: dict[str, Any]) -> Optimizer:
    """fused: one pass over the weights; on a CPU many times faster than a loop over operations."""
    rate, momentum = config.learning_rate, momentum_of(config)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, rate, fused=True, capturable=config.cuda_graph, **args)
    if config.optimizer == "lars":
        return LARS(groups, rate, momentum, **args)
    return SGD(groups, momentum, config.use_nesterov_momentum, **args)
