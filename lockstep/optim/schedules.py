"""The learning rate of an epoch: a function of the configuration and the past, not a state.

So a resumed run can't have it wrong. It changes between epochs only. Each policy is one function.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lockstep.config import Config

FALL = 0.1  # what a learning rate falls to
WARM_UP_START = 0.1  # of the rate, in the first epoch of a warm-up


def learning_rate(config: "Config", epoch: int, errors: Sequence[float]) -> float:
    """The rate of an epoch (1 is the first), given the top-1 validation errors of the epochs before it.

    During `warm_up_epochs` it rises linearly from a tenth (Goyal et al. 2017, arXiv 1706.02677, section 2.2,
    there step by step); the first epoch behind them has the whole rate.
    """
    done, warm_up = epoch - 1, config.warm_up_epochs
    if done < warm_up:
        return config.learning_rate * (WARM_UP_START + (1 - WARM_UP_START) * done / warm_up)
    return config.learning_rate * SCHEDULES[config.lr_policy].share(config, epoch, errors)


def _step(config: "Config", epoch: int, errors: Sequence[float]) -> float:
    """A tenth after each epoch of `lr_step`."""
    return FALL ** sum(epoch > step for step in config.lr_step)


def _auto(config: "Config", epoch: int, errors: Sequence[float]) -> float:
    """theano_alexnet's rule: from epoch 6 on, fall when two epochs have brought less than the threshold.

    Both epochs must have been trained at the present rate, or one plateau would make the rate fall twice.
    """
    n_falls, last_fall = 0, config.warm_up_epochs
    for done in range(6, min(len(errors), epoch - 1) + 1):
        if done - last_fall > 2 and errors[done - 3] - errors[done - 1] < config.lr_adapt_threshold:
            n_falls, last_fall = n_falls + 1, done
    return FALL**n_falls


def _cosine(config: "Config", epoch: int, errors: Sequence[float]) -> float:
    """Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, one period down to zero."""
    return (1 - math.cos(math.pi * _left(config, epoch))) / 2


def _polynomial(config: "Config", epoch: int, errors: Sequence[float]) -> float:
    """What is left of the run to the power of `lr_power`, as in Caffe."""
    return float(_left(config, epoch) ** config.lr_power)


def _left(config: "Config", epoch: int) -> float:
    """How much of the run behind the warm-up is left when an epoch begins: from 1 to 0."""
    progress = (epoch - 1 - config.warm_up_epochs) / max(1, config.n_epochs - config.warm_up_epochs)
    return 1 - min(1.0, progress)


@dataclass(frozen=True)
class Schedule:
    """One policy.

    share: of `learning_rate` that an epoch (1 is the first) behind the warm-up has, given the configuration,
    the epoch, and the top-1 validation errors so far. spans_run: whether it depends on n_epochs, which a
    resumed run may have changed.
    """

    share: Callable[["Config", int, Sequence[float]], float]
    spans_run: bool = False


ScheduleName = Literal["step", "auto", "cosine", "polynomial"]
SCHEDULES: dict[ScheduleName, Schedule] = {
    "step": Schedule(_step),
    "auto": Schedule(_auto),
    "cosine": Schedule(_cosine, spans_run=True),
    "polynomial": Schedule(_polynomial, spans_run=True),
}
