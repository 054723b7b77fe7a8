"""What a configuration may say beyond the types of its keys: ranges, and what goes with what."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.config import hosts, rules
from lockstep.errors import UserError
from lockstep.optim import args_of

if TYPE_CHECKING:
    from lockstep.config import Config

_AT_LEAST = {
    "accumulate": 1,
    "batch_size": 1,
    "check_every": 1,
    "cpu_threads": 1,
    "input_size": 1,
    "hosts": 1,
    "keep": 1,
    "label_smoothing": 0,
    "load_epoch": 0,
    "loader_restarts": 0,
    "minibatch": 1,
    "momentum": 0,
    "n_classes": 1,
    "n_epochs": 1,
    "n_slots": 2,  # one being filled, one being used
    "pretrained_epoch": 0,
    "print_freq": 1,
    "rand_color": 0,
    "read_retries": 0,
    "read_threads": 1,
    "restarts": 1,
    "seed": 0,
    "shuffle_block": 1,
    "snapshot_freq": 1,
    "wait_deadline": 1,
    "warm_up_epochs": 0,
    "weight_decay": 0,
}
_ABOVE_0 = ("clip_norm", "ema_decay", "learning_rate", "lr_power", "save_minutes", "scale")
_BELOW_1 = ("ema_decay", "label_smoothing", "momentum")
_LARGEST = 2**31 - 1
_MOST_RESTARTS = 100  # each has a pipe open from the start
_RUN_NAME = re.compile(r"[\w+-][\w.+-]{0,99}")


def check(config: "Config", sources: Mapping[str, str]) -> None:
    """Raises UserError naming the key that can't work, and in `sources` where it came from."""
    for key, problem in _problems(config):
        raise UserError(f"{sources.get(key, 'default')}: {key} {problem}")


def _problems(config: "Config") -> Iterable[tuple[str, str]]:
    yield from _bad_numbers(config)
    yield from _bad_lists(config)
    yield from _bad_combinations(config)
    yield from rules.problems(config)
    yield from hosts.problems(config)


def _bad_numbers(config: "Config") -> Iterable[tuple[str, str]]:
    """Single values that have the right type and can't work all the same."""
    for key, least in _AT_LEAST.items():
        value = getattr(config, key)
        if isinstance(value, int | float) and not value >= least:
            yield key, f"must be at least {least}, not {value}"
    for key in config.__dataclass_fields__:
        value = getattr(config, key)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            yield key, f"must be a finite number, not {value}"
        if type(value) is int and value > _LARGEST:
            yield key, f"must be at most {_LARGEST}, not {value}"
    for key in _ABOVE_0:
        value = getattr(config, key)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(number is not None and not number > 0 for number in numbers):
            yield key, f"must be above 0, not {value}"
    for key in _BELOW_1:
        value = getattr(config, key)
        if value is not None and not value < 1:
            yield key, f"must be below 1, not {value}"


def _bad_lists(config: "Config") -> Iterable[tuple[str, str]]:
    if list(config.lr_step) != sorted(set(config.lr_step)):
        yield "lr_step", f"must rise: {list(config.lr_step)}"
    mean = config.subtract_mean
    if isinstance(mean, tuple) and (len(mean) != 3 or not all(0 <= number <= 255 for number in mean)):
        yield "subtract_mean", f"as a list has 3 numbers from 0 to 255, for R, G and B: {list(mean)}"
    if isinstance(config.scale, tuple) and len(config.scale) != 3:
        yield "scale", f"as a list has 3 numbers, for R, G and B: {list(config.scale)}"
    for key in ("model_args", "optimizer_args", "rule_args"):
        if not _survives_json(getattr(config, key)):
            yield key, f"may hold what JSON can keep, with texts as keys: {getattr(config, key)}"
    try:
        args_of(config)
    except UserError as error:
        yield "optimizer_args", f"can't be used: {error}"


def _bad_combinations(config: "Config") -> Iterable[tuple[str, str]]:
    if config.resume_train == "auto" and config.run_name is None:
        yield "resume_train", "auto needs run_name, the run that begins or goes on"
    if config.loader_restarts and not config.para_load:
        yield "loader_restarts", "needs para_load: true; without it there is no loader to be lost"
    if config.loader_restarts > _MOST_RESTARTS:
        yield "loader_restarts", f"must be at most {_MOST_RESTARTS}, not {config.loader_restarts}"
    if config.use_nesterov_momentum and not (config.use_momentum and config.momentum > 0):
        yield "use_nesterov_momentum", "needs use_momentum: true and a momentum above 0"
    if config.use_nesterov_momentum and config.optimizer != "sgd":
        yield "use_nesterov_momentum", f"is for optimizer: sgd, not {config.optimizer}"
    if config.finetune and config.pretrained is None:
        yield "finetune", "needs `pretrained`, the weights to start from"
    as_it_was = not (config.finetune or config.pretrained_allow or config.pretrained_channels == "bgr")
    if config.pretrained_part == "whole" and not as_it_was:
        others = "finetune, pretrained_allow or pretrained_channels: bgr"
        yield (
            "pretrained_part",
            f"whole goes on with a training as it was: it can't be combined with {others}",
        )
    if config.warm_up_epochs >= config.n_epochs:
        yield "warm_up_epochs", f"must be below n_epochs, {config.n_epochs}: {config.warm_up_epochs}"
    if config.cuda_graph is True and config.augment_on == "loader":
        yield "cuda_graph", "needs augment_on: trainer, which puts every minibatch into the same place"
    if config.upload == "trainer" and config.augment_on == "loader" and config.para_load:
        yield "upload", "trainer leaves no GPU to the loader: augment_on must be trainer"
    if config.cuda_graph is True and config.accumulate > 1:
        yield "cuda_graph", "captures steps of one minibatch: set accumulate: 1 and a larger batch_size"
    if config.run_name is not None and not _RUN_NAME.fullmatch(config.run_name):
        words = "is a folder's name inside weights_dir, up to 100 letters, digits and -_.+"
        yield "run_name", f"{words} : {config.run_name!r}"


def _survives_json(value: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
