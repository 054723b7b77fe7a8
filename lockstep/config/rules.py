"""The synchronization rule (lockstep/sync), its arguments, and the checks of both, without torch."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lockstep.config import hosts, shares
from lockstep.errors import UserError
from lockstep.optim import OPTIMIZERS
from lockstep.typed import merge_arguments

if TYPE_CHECKING:
    from lockstep.config import Config

RuleName = Literal["auto", "weights", "gradients", "local", "outer", "elastic", "gossip"]
ARGS: Mapping[str, Mapping[str, Any]] = {
    "local": {"every": 8, "from_epoch": 0},
    "outer": {"every": 32, "from_epoch": 0, "learning_rate": 1.0, "momentum": 0.3},
    "elastic": {"every": 8, "alpha": 0.1},  # lower from 10 trainers on, which would diverge
    "gossip": {"every": 1},
}
_ELASTICITY = 0.9  # alpha times the number of trainers: beta in section 5 of the EASGD paper
# The weights that a checkpoint holds beside the replicas, for rules whose replicas are never equal.
_CHECKPOINT_WEIGHTS = {"elastic": "centre", "gossip": "mean"}
KINDS_OF_RULES = ("outer/", "replica")  # prefixes of the names of a rule's tensors in checkpoints


def rule_of(config: "Config") -> RuleName:
    """Return the rule of a run. One trainer without peers steps as in `weights`, without synchronizing."""
    if config.logical_ranks is not None:
        return "gradients"
    if config.n_trainers <= 1:
        return "weights"
    if config.rule != "auto":
        return config.rule
    if config.n_hosts > 1:
        return "gradients"
    exact = config.exchange == "swap" or not (OPTIMIZERS[config.optimizer].inexact or config.clip_norm)
    return "weights" if exact else "gradients"


def discarded_replicas(rule: str, n_trainers: int, config: "Config") -> str:
    """Return a note if a checkpoint's unequal replicas can't each resume in a trainer; '' otherwise.

    Args:
        rule: The rule that the checkpoint was made with.
        n_trainers: The number of trainers that it was made with.
    """
    if rule not in _CHECKPOINT_WEIGHTS or n_trainers < 2:
        return ""
    if rule_of(config) in _CHECKPOINT_WEIGHTS and n_trainers == len(config.devices):
        return ""
    weights = _CHECKPOINT_WEIGHTS[rule]
    return f"the checkpoint has {n_trainers} replicas of rule: {rule}: all begin with their {weights}"


def on_failure_of(config: "Config") -> Literal["stop", "restart", "shrink"]:
    """Return what a run does when a process dies or hangs. Several trainers restart."""
    if config.on_failure != "auto":
        return config.on_failure
    return "restart" if config.n_trainers > 1 else "stop"


def rule_args_of(config: "Config") -> dict[str, Any]:
    """Return all arguments of `rule`: those in `rule_args`, and the defaults of the others.

    Raises:
        UserError: An argument is unknown, has another type or is out of range; the message names it.
    """
    defaults = dict(ARGS.get(config.rule, {}))
    if "alpha" in defaults and config.n_trainers:
        defaults["alpha"] = min(defaults["alpha"], _ELASTICITY / config.n_trainers)
    args = merge_arguments(config.rule, defaults, config.rule_args)
    for name, least in (("every", 1), ("from_epoch", 0)):
        if args.get(name, least) < least:
            raise UserError(f"{name} must be at least {least}, not {args[name]}")
    if not 0 < args.get("learning_rate", 1.0) <= 1e30:  # a float32 holds it
        raise UserError(f"learning_rate must be above 0 and at most 1e30, not {args['learning_rate']}")
    if not 0 < args.get("alpha", 0.1) < 1:
        raise UserError(f"alpha must be above 0 and below 1, not {args['alpha']}")
    if args.get("alpha", 0.0) * (config.n_trainers + 1) >= 2:
        raise UserError(
            f"alpha {args['alpha']} makes {config.n_trainers} trainers and their center diverge: it must be "
            f"below 2 / (trainers + 1), {2 / (config.n_trainers + 1):.3g}"
        )
    if not 0 <= args.get("momentum", 0.0) < 1:
        raise UserError(f"momentum must be from 0 to below 1, not {args['momentum']}")
    return args


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Yield each key that can't work with the rule, and the problem."""
    try:
        rule_args_of(config)
    except UserError as error:
        yield "rule_args", f"can't be used: {error}"
    if config.exchange == "swap" and (config.rule not in ("auto", "weights") or config.logical_ranks):
        name = "logical_ranks" if config.logical_ranks else f"rule: {config.rule}"
        yield "exchange", f"swap averages whole arenas: it goes with rule: weights only, not with {name}"
    if config.on_failure == "shrink" and config.global_batch_size is None:
        yield (
            "on_failure",
            "shrink needs global_batch_size, so that fewer trainers continue the same training",
        )
    if config.freeze and (config.exchange == "swap" or config.rule in ("outer", "elastic", "gossip")):
        name = "exchange: swap" if config.exchange == "swap" else f"rule: {config.rule}"
        yield (
            "freeze",
            f"goes with rule: weights, gradients or local, not with {name}, which averages all weights",
        )
    if config.unfreeze_epoch is not None:
        yield from _bad_unfreezing(config)
    if config.logical_ranks is not None:
        yield from _bad_logical_ranks(config)
    yield from shares.problems(config)
    if config.recheck_every is not None:
        yield from _bad_recheck(config)
    if config.factors:
        yield from _bad_factors(config)
    if config.sync_batch_norm:
        yield from _bad_batch_norm(config)


def _bad_batch_norm(config: "Config") -> Iterable[tuple[str, str]]:
    """Check sync_batch_norm: trainers synchronize in every layer, all in the same step and not captured."""
    if config.rule not in ("auto", "weights", "gradients"):
        yield "sync_batch_norm", f"goes with rule: weights or gradients, not with {config.rule}"
    if config.logical_ranks is not None:
        yield "sync_batch_norm", "can't be combined with logical_ranks, whose parts have their own statistics"
    if config.cuda_graph is True:
        yield "sync_batch_norm", "can't be captured: set cuda_graph: false"
    if config.exchange == "swap":
        yield "sync_batch_norm", "needs another exchange than swap, which averages whole arenas only"


def _bad_unfreezing(config: "Config") -> Iterable[tuple[str, str]]:
    if not config.freeze:
        yield "unfreeze_epoch", "ends the freezing of parameters: name them with freeze, or remove it"
    if config.unfreeze_epoch is not None and config.unfreeze_epoch > config.n_epochs:
        reason = f"{config.unfreeze_epoch} is after the last epoch, n_epochs: {config.n_epochs}"
        yield "unfreeze_epoch", f"{reason}. Choose an earlier one, or null to freeze for the whole run"
    if config.factors:
        yield "unfreeze_epoch", "can't be combined with factors, whose layers are fixed: set factors: false"


def _bad_factors(config: "Config") -> Iterable[tuple[str, str]]:
    if config.logical_ranks is not None:
        yield "factors", "can't be added in a fixed order: set factors: false or logical_ranks: null"
    elif config.rule != "gradients":
        yield "factors", f"replace gradients: set rule: gradients, not {config.rule}"
    if config.cuda_graph is True:
        yield "cuda_graph", "can't capture factors, which are counted in every pass: set cuda_graph: false"


def _bad_logical_ranks(config: "Config") -> Iterable[tuple[str, str]]:
    n_logical = config.logical_ranks or 0
    if config.n_hosts > 1 and n_logical & (n_logical - 1):
        yield "logical_ranks", f"must be a power of two with {config.n_hosts} hosts, not {n_logical}"
    if config.global_batch_size is None:
        yield "logical_ranks", "needs global_batch_size, the images per step over all trainers"
    if config.rule not in ("auto", "gradients"):
        yield "logical_ranks", f"adds gradients: it goes with rule: gradients only, not {config.rule}"
    if config.accumulate > 1:
        yield "logical_ranks", "has a pass for each part: set accumulate: 1 and a larger global_batch_size"
    if config.compile:
        reason = "gives the same bits for any number of trainers, which compiled code does not"
        yield "logical_ranks", f"{reason}: set compile: false"
    if config.cuda_graph is True:
        yield "logical_ranks", "can't be captured: set cuda_graph: false"


def _bad_recheck(config: "Config") -> Iterable[tuple[str, str]]:
    if config.logical_ranks is None:
        yield "recheck_every", "checks logical ranks: set logical_ranks and global_batch_size"
    if config.n_hosts > 1:
        yield "recheck_every", f"is for one host: with {config.n_hosts} hosts set it to null"


def settle(config: "Config") -> tuple["Config", list[str]]:
    """Return the configuration with the batch_size that `global_batch_size` gives, and messages about it.

    Args:
        config: A configuration whose `devices` are filled in.

    Raises:
        UserError: The devices can't share the work, or the rule's arguments don't fit their number.
    """
    n_trainers = config.n_trainers
    hosts.check_devices(config)
    try:
        rule_args_of(config)
    except UserError as error:
        raise UserError(f"rule_args can't be used: {error}") from error
    shares.check_devices(config)
    if config.global_batch_size is None:
        return config, []
    if config.global_batch_size < n_trainers:
        raise UserError(
            f"global_batch_size: {config.global_batch_size} images are too few for {n_trainers} trainers"
        )
    share = -(-config.global_batch_size // n_trainers)
    if config.logical_ranks is not None:
        share = -(-config.global_batch_size * shares.most_of(config) // config.logical_ranks)
    unit = "step" if config.accumulate == 1 else "minibatch"
    message = f"global_batch_size: {config.global_batch_size} images per {unit}, at most {share} per trainer"
    if config.accumulate > 1:
        message += f"; a step has {config.global_batch_size * config.accumulate} by accumulate"
    return dataclasses.replace(config, batch_size=share), [f"{message}; batch_size is ignored"]
