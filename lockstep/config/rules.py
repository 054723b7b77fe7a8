"""Which rule keeps trainers one (lockstep/sync), its arguments, and what can't be combined, without torch."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lockstep.config import hosts
from lockstep.errors import UserError, nearest
from lockstep.optim import OPTIMIZERS
from lockstep.typed import convert, describe

if TYPE_CHECKING:
    from lockstep.config import Config

RuleName = Literal["auto", "weights", "gradients", "local", "outer", "elastic", "gossip"]
ARGS: Mapping[str, Mapping[str, Any]] = {
    "local": {"every": 8, "from_epoch": 0},
    "outer": {"every": 32, "from_epoch": 0, "learning_rate": 1.0, "momentum": 0.3},
    "elastic": {"every": 8, "alpha": 0.1},
    "gossip": {"every": 1},
}
KINDS_OF_RULES = ("outer/", "replica")  # how names of tensors in checkpoints begin that are a rule's


def rule_of(config: "Config") -> RuleName:
    """The rule of a run. A lone trainer takes its own steps, as in `weights`, and has nobody to meet."""
    if config.parts is not None:
        return "gradients"
    if config.n_trainers <= 1:
        return "weights"
    if config.rule != "auto":
        return config.rule
    if config.hosts > 1:
        return "gradients"
    exact = config.exchange == "swap" or not (OPTIMIZERS[config.optimizer].inexact or config.clip_norm)
    return "weights" if exact else "gradients"


def rule_args_of(config: "Config") -> dict[str, Any]:
    """All arguments of `rule`: those that were given, and the defaults of the others.

    Raises UserError naming one that it does not have, that is of another type, or that can't be used.
    """
    args = dict(ARGS.get(config.rule, {}))
    for name, value in config.rule_args.items():
        if name not in args:
            there = f"it has: {', '.join(args)}" if args else "it has none"
            raise UserError(f"{config.rule} has no {name}{nearest(name, args)} ({there})")
        try:
            args[name] = convert(value, type(args[name]))
        except TypeError:
            raise UserError(f"{name} must be {describe(type(args[name]))}, not {value!r}") from None
    for name, least in (("every", 1), ("from_epoch", 0)):
        if args.get(name, least) < least:
            raise UserError(f"{name} must be at least {least}, not {args[name]}")
    if not 0 < args.get("learning_rate", 1.0) < math.inf:
        raise UserError(f"learning_rate must be a finite number above 0, not {args['learning_rate']}")
    if not 0 < args.get("alpha", 0.1) < 1:
        raise UserError(f"alpha must be above 0 and below 1, not {args['alpha']}")
    if not 0 <= args.get("momentum", 0.0) < 1:
        raise UserError(f"momentum must be from 0 to below 1, not {args['momentum']}")
    return args


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Keys that can't work, and what is wrong with each."""
    try:
        rule_args_of(config)
    except UserError as error:
        yield "rule_args", f"can't be used: {error}"
    if config.exchange == "swap" and (config.rule not in ("auto", "weights") or config.parts):
        name = "parts" if config.parts else f"rule: {config.rule}"
        yield "exchange", f"swap averages whole arenas: it goes with rule: weights only, not with {name}"
    if config.on_loss == "shrink" and config.minibatch is None:
        yield "on_loss", "shrink needs minibatch, so that fewer trainers go on with the same training"
    if config.parts is not None:
        yield from _bad_parts(config)
    if config.factors:
        yield from _bad_factors(config)
    if config.sync_batch_norm:
        yield from _bad_norms(config)


def _bad_norms(config: "Config") -> Iterable[tuple[str, str]]:
    """Trainers meet in every layer of every step: they must all be in the same step, and not in a graph."""
    if config.rule not in ("auto", "weights", "gradients"):
        yield "sync_batch_norm", f"goes with rule: weights or gradients, not with {config.rule}"
    if config.parts is not None:
        yield "sync_batch_norm", "can't be combined with parts, which have statistics of their own"
    if config.cuda_graph is True:
        yield "sync_batch_norm", "can't be captured: set cuda_graph: false"
    if config.exchange == "swap":
        yield "sync_batch_norm", "needs another exchange than swap, which averages whole arenas only"


def _bad_factors(config: "Config") -> Iterable[tuple[str, str]]:
    if config.parts is not None:
        yield "factors", "can't be added in a fixed order: set factors: false or parts: null"
    elif config.rule != "gradients":
        yield "factors", f"take the place of gradients: set rule: gradients, not {config.rule}"
    if config.cuda_graph is True:
        yield "cuda_graph", "can't capture factors, which are counted in every pass: set cuda_graph: false"


def _bad_parts(config: "Config") -> Iterable[tuple[str, str]]:
    parts = config.parts or 0
    if parts < 1 or parts & (parts - 1):
        yield "parts", f"must be a power of two, not {parts}"
    if config.minibatch is None:
        yield "parts", "needs minibatch, the pictures of a step that are cut into parts whatever the trainers"
    if config.rule not in ("auto", "gradients"):
        yield "parts", f"adds gradients up: it goes with rule: gradients only, not {config.rule}"
    if config.accumulate > 1:
        yield "parts", "has its own pass for each part: set accumulate: 1 and a larger minibatch"
    if config.compile:
        words = "gives the same bits for any number of trainers, which compiled code does not"
        yield "parts", f"{words}: set compile: false"
    if config.cuda_graph is True:
        yield "parts", "can't be captured: set cuda_graph: false"


def settle(config: "Config") -> tuple["Config", list[str]]:
    """The configuration with the batch_size that `minibatch` means for its devices, and notices about it.

    Raises UserError where the devices can't share the work so.
    """
    n_trainers = config.n_trainers
    hosts.check_devices(config)
    if config.parts is not None and config.parts % n_trainers:
        raise UserError(f"parts: {n_trainers} trainers can't share {config.parts} parts; 1, 2, 4, ... can")
    if config.minibatch is None:
        return config, []
    if config.minibatch < n_trainers:
        raise UserError(f"minibatch: {config.minibatch} pictures are too few for {n_trainers} trainers")
    share = -(-config.minibatch // n_trainers)
    notice = (
        f"minibatch: {config.minibatch} pictures a step, at most {share} a trainer, whatever batch_size says"
    )
    return dataclasses.replace(config, batch_size=share), [notice]
