"""The learning rate of an epoch: a function of the configuration and the past, not a state.

So a resumed run can't have it wrong. It changes between epochs only, so that a captured step (cuda_graph) is
captured once an epoch at most.
"""

import math
from collections.abc import Sequence

from lockstep.config import Config

FALL = 0.1  # what a learning rate falls to
WARM_UP_START = 0.1  # of the rate, in the first epoch of a warm-up


def learning_rate(config: Config, epoch: int, errors: Sequence[float]) -> float:
    """The rate of an epoch (1 is the first), given the top-1 validation errors of the epochs before it.

    During `warm_up_epochs` it rises linearly from a tenth (Goyal et al. 2017, arXiv 1706.02677, section 2.2,
    there step by step); the first epoch behind them has the whole rate.
    """
    done, warm_up = epoch - 1, config.warm_up_epochs
    if done < warm_up:
        return config.learning_rate * (WARM_UP_START + (1 - WARM_UP_START) * done / warm_up)
    if config.lr_policy == "step":
        share = FALL ** sum(epoch > step for step in config.lr_step)
    elif config.lr_policy == "auto":
        share = FALL ** _auto_falls(errors[:done], config.lr_adapt_threshold, warm_up)
    else:
        share = _decay(config, (done - warm_up) / max(1, config.n_epochs - warm_up))
    return config.learning_rate * share


def _decay(config: Config, progress: float) -> float:
    """What is left of the rate when `progress`, from 0 to 1, of the run behind the warm-up is done.

    cosine: Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, one period down to zero. polynomial:
    (1 - progress)^lr_power, as in Caffe.
    """
    left = 1 - min(1.0, progress)
    if config.lr_policy == "cosine":
        return (1 - math.cos(math.pi * left)) / 2
    return float(left**config.lr_power)


def _auto_falls(errors: Sequence[float], threshold: float, warm_up: int) -> int:
    """theano_alexnet's rule: from epoch 6 on, fall when two epochs have brought less than the threshold.

    Both epochs must have been trained at the present rate, or one plateau would make the rate fall twice.
    """
    n_falls, last_fall = 0, warm_up
    for epoch in range(6, len(errors) + 1):
        if epoch - last_fall > 2 and errors[epoch - 3] - errors[epoch - 1] < threshold:
            n_falls, last_fall = n_falls + 1, epoch
    return n_falls
