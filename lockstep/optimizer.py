"""SGD as theano_alexnet does it, on torch.optim, momenta in the arena; and the learning rate's policy."""

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.arena import Arena
from lockstep.config import Config

# Biases learn twice as fast and do not decay, as in cuda-convnet, Caffe and theano_alexnet.
BIAS_RATE = 2.0
FALL = 0.1  # what a learning rate falls to


def momentum_of(config: Config) -> float:
    return config.momentum if config.use_momentum else 0.0


def make_optimizer(model: nn.Module, arena: Arena, config: Config) -> torch.optim.SGD:
    """SGD with weight decay, and with momentum or Nesterov momentum where the configuration has it.

    torch keeps v = m v + g and steps by the rate times v; theano_alexnet keeps v = m v - rate g. They are
    the same as long as the rate stays; when it falls, torch's step falls with it at once.
    """
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    biases = [parameter for name, parameter in named if name.split(".")[-1] == "bias"]
    weights = [parameter for name, parameter in named if name.split(".")[-1] != "bias"]
    groups = [
        {"params": weights, "weight_decay": config.weight_decay, "rate_scale": 1.0},
        {"params": biases, "weight_decay": 0.0, "rate_scale": BIAS_RATE},
    ]
    optimizer = torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        momentum=momentum_of(config),
        nesterov=config.use_nesterov_momentum,
        fused=True,  # one pass over the weights: on a CPU many times faster than a loop over operations
    )
    set_learning_rate(optimizer, config.learning_rate)
    if momentum_of(config):
        for name, parameter in named:
            optimizer.state[parameter]["momentum_buffer"] = arena.momentum(name)
    return optimizer


def set_learning_rate(optimizer: torch.optim.SGD, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def learning_rate(config: Config, epoch: int, errors: Sequence[float]) -> float:
    """The rate of an epoch (1 is the first), given the top-1 validation errors of the epochs before it.

    A function of the past, not a state: a resumed run can't have it wrong.
    """
    if config.lr_policy == "step":
        n_falls = sum(epoch > step for step in config.lr_step)
    else:
        n_falls = _auto_falls(errors[: epoch - 1], config.lr_adapt_threshold)
    return config.learning_rate * FALL**n_falls


def _auto_falls(errors: Sequence[float], threshold: float) -> int:
    """theano_alexnet's rule: from epoch 6 on, fall when two epochs have brought less than the threshold.

    Both epochs must have been trained at the present rate, or one plateau would make the rate fall twice.
    """
    n_falls, last_fall = 0, 0
    for epoch in range(6, len(errors) + 1):
        if epoch - last_fall > 2 and errors[epoch - 3] - errors[epoch - 1] < threshold:
            n_falls, last_fall = n_falls + 1, epoch
    return n_falls
