"""Optimizers and learning rates. Each optimizer is one file that declares what the program must know of it.

`contract.py` is the interface, `schedules.py` has the learning rates. `fused.py` takes the steps and is the
only file that imports torch at once: the launcher checks configurations with the others. The optimizer of a
network is made in lockstep/network/optimizer.py.
"""

from typing import TYPE_CHECKING, Any, Literal

from lockstep.optim.adamw import AdamW
from lockstep.optim.contract import Optimizer
from lockstep.optim.lars import LARS
from lockstep.optim.sgd import SGD
from lockstep.typed import merge_arguments

if TYPE_CHECKING:
    from lockstep.config import Config

OptimizerName = Literal["sgd", "adamw", "lars"]
OPTIMIZERS: dict[OptimizerName, Optimizer] = {"sgd": SGD(), "adamw": AdamW(), "lars": LARS()}


def states_of(config: "Config") -> tuple[str, ...]:
    """Return the kinds of state that the optimizer keeps for every parameter, by their names in the arena."""
    return OPTIMIZERS[config.optimizer].states(config)


def args_of(config: "Config") -> dict[str, Any]:
    """Return all arguments of the optimizer: the given ones, and the defaults of the others.

    Raises:
        UserError: An argument is unknown, of another type, or out of range; the message names it.
    """
    optimizer = OPTIMIZERS[config.optimizer]
    args = merge_arguments(config.optimizer, optimizer.defaults, config.optimizer_args)
    optimizer.check(args)
    return args
