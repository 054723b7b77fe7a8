"""The learning rate, as a function of the configuration, the progress and the validation errors so far.

It has no state, so a resumed run computes the same rate. The rate changes with every step or between epochs
(`lr_update`). Each policy is one function of the progress: completed epochs with a fraction.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lockstep.config import Config

WARM_UP_START = 0.1  # fraction of the rate at the beginning of a warm-up
CYCLE_START = 0.04  # fraction of the rate at the beginning of one_cycle
CYCLE_RISE = 0.3  # share of the run in which the rate of one_cycle rises, without warm_up_epochs


def learning_rate(config: "Config", epoch: int, errors: Sequence[float], share_done: float = 0.0) -> float:
    """Return the rate of a step.

    During `warm_up_epochs` it rises linearly from a tenth (Goyal et al. 2017, arXiv 1706.02677, section 2.2);
    the first step after them has the whole rate. `one_cycle` has a rise of its own instead.

    Args:
        config: The run's configuration.
        epoch: The step's epoch; 1 is the first.
        errors: The top-1 validation errors of the epochs before.
        share_done: The share of the epoch's samples that earlier steps have trained on, from 0 to below 1.
    """
    policy = SCHEDULES[config.lr_policy]
    by_step = config.lr_update == "step" or (config.lr_update == "auto" and policy.falls_to_least)
    whole, progress = float(epoch - 1), epoch - 1 + share_done
    warm_up = progress if config.lr_update != "epoch" else whole
    if config.lr_policy != "one_cycle" and warm_up < config.warm_up_epochs:
        share = WARM_UP_START + (1 - WARM_UP_START) * warm_up / config.warm_up_epochs
        return config.learning_rate * share
    share = policy.share(config, progress if by_step else whole, errors)
    if policy.falls_to_least:
        return config.min_lr + (config.learning_rate - config.min_lr) * share
    return max(config.min_lr, config.learning_rate * share)


def spans_run(config: "Config") -> bool:
    """Return whether the rate depends on n_epochs, which a resumed run may have changed."""
    by_shares = config.lr_policy == "step" and any(isinstance(at, float) for at in config.lr_step)
    return SCHEDULES[config.lr_policy].falls_to_least or by_shares


def _step(config: "Config", progress: float, errors: Sequence[float]) -> float:
    """Return `lr_gamma` to the power of the falls so far: at epochs, or at shares of the run."""
    ends = [round(at * config.n_epochs, 9) if isinstance(at, float) else at for at in config.lr_step]
    return float(config.lr_gamma ** sum(progress >= end for end in ends))


def _auto(config: "Config", progress: float, errors: Sequence[float]) -> float:
    """Return theano_alexnet's share: from epoch 6 on, fall if two epochs have improved too little.

    Both epochs must have been trained at the present rate, or one plateau would make the rate fall twice.
    """
    n_falls, last_fall = 0, config.warm_up_epochs
    for done in range(6, min(len(errors), int(progress)) + 1):
        if done - last_fall > 2 and errors[done - 3] - errors[done - 1] < config.lr_adapt_threshold:
            n_falls, last_fall = n_falls + 1, done
    return float(config.lr_gamma**n_falls)


def _cosine(config: "Config", progress: float, errors: Sequence[float]) -> float:
    """Return one period down to zero: Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5."""
    return (1 - math.cos(math.pi * _left(config, progress))) / 2


def _polynomial(config: "Config", progress: float, errors: Sequence[float]) -> float:
    """Return the remaining share of the run to the power of `lr_power`, as in Caffe."""
    return float(_left(config, progress) ** config.lr_power)


def _one_cycle(config: "Config", progress: float, errors: Sequence[float]) -> float:
    """Return a rise and a fall, each half a period of a cosine: Smith and Topin 2018, arXiv 1708.07120.

    The rise takes `warm_up_epochs`, or CYCLE_RISE of the run. The momentum stays as it is.
    """
    rise = config.warm_up_epochs or CYCLE_RISE * config.n_epochs
    if progress < rise:
        return CYCLE_START + (1 - CYCLE_START) * (1 - math.cos(math.pi * progress / rise)) / 2
    left = 1 - min(1.0, (progress - rise) / (config.n_epochs - rise))
    return (1 - math.cos(math.pi * left)) / 2


def _left(config: "Config", progress: float) -> float:
    """Return how much of the run after the warm-up remains: from 1 to 0."""
    return 1 - min(1.0, (progress - config.warm_up_epochs) / (config.n_epochs - config.warm_up_epochs))


@dataclass(frozen=True)
class Schedule:
    """A learning rate policy.

    Attributes:
        share: Returns the fraction of `learning_rate`, or of its distance to `min_lr`, after the warm-up,
            given the configuration, the progress in epochs, and the top-1 validation errors so far.
        falls_to_least: Whether the rate is a curve that ends with the run, at `min_lr`.
    """

    share: Callable[["Config", float, Sequence[float]], float]
    falls_to_least: bool = False


ScheduleName = Literal["step", "auto", "cosine", "polynomial", "one_cycle"]
SCHEDULES: dict[ScheduleName, Schedule] = {
    "step": Schedule(_step),
    "auto": Schedule(_auto),
    "cosine": Schedule(_cosine, falls_to_least=True),
    "polynomial": Schedule(_polynomial, falls_to_least=True),
    "one_cycle": Schedule(_one_cycle, falls_to_least=True),
}
