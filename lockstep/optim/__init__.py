"""Optimizers and learning rates. Each optimizer is one file, which declares all that is known of it.

contract.py says what that is, schedules.py has the learning rates, fused.py takes SGD's steps and is the only
one that needs torch at once: the launcher checks configurations by the others. An optimizer of a network is
made in lockstep/network/optimizer.py.
"""

from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import UserError, nearest
from lockstep.optim.adamw import AdamW
from lockstep.optim.contract import Optimizer
from lockstep.optim.lars import LARS
from lockstep.optim.sgd import SGD
from lockstep.typed import convert, describe

if TYPE_CHECKING:
    from lockstep.config import Config

OptimizerName = Literal["sgd", "adamw", "lars"]
OPTIMIZERS: dict[OptimizerName, Optimizer] = {"sgd": SGD(), "adamw": AdamW(), "lars": LARS()}


def states_of(config: "Config") -> tuple[str, ...]:
    """What the optimizer keeps of every parameter, by its name in the arena."""
    return OPTIMIZERS[config.optimizer].states(config)


def args_of(config: "Config") -> dict[str, Any]:
    """All arguments of the optimizer: those that were given, and the defaults of the others.

    Raises UserError naming one that it does not have, that is of another type, or that can't be used.
    """
    optimizer = OPTIMIZERS[config.optimizer]
    args = dict(optimizer.defaults)
    for name, value in config.optimizer_args.items():
        if name not in args:
            there = ", ".join(args)
            raise UserError(f"{config.optimizer} has no {name}{nearest(name, args)} (it has: {there})")
        hint = tuple[float, ...] if isinstance(args[name], tuple) else float
        try:
            args[name] = convert(value, hint)
        except TypeError:
            raise UserError(f"{name} must be {describe(hint)}, not {value!r}") from None
    optimizer.check(args)
    return args
