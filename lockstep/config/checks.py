"""Checks of a configuration beyond the types of its keys: ranges and combinations."""

import json
import math
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.config import augmentation, hosts, rules, tasks
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.optim import args_of
from lockstep.typed import Range, range_of

_HINTS = typing.get_type_hints(Config, include_extras=True)
_RANGES = {key: found for key, hint in _HINTS.items() if (found := range_of(hint))}
_LARGEST = 2**31 - 1
_MOST_CHANNELS = 4
_OWN_FUNCTION = re.compile(r"[\w.]+:\w+")
# As long as file systems allow: a run that goes back to a checkpoint adds that to the name.
_RUN_NAME = re.compile(r"[\w+-][\w.+-]{0,254}")


def check(config: Config, sources: Mapping[str, str]) -> None:
    """Raise UserError for the first key whose value is out of range, or impossible beside the others.

    Args:
        config: The merged configuration.
        sources: The file or "command line" that set each key; the message names it.
    """
    for key, problem in _problems(config):
        raise UserError(f"{sources.get(key, 'default')}: {key} {problem}")


def _problems(config: Config) -> Iterable[tuple[str, str]]:
    yield from _bad_numbers(config)
    yield from _bad_lists(config)
    yield from _bad_datasets(config)
    yield from _bad_combinations(config)
    yield from tasks.problems(config)
    yield from augmentation.problems(config)
    yield from rules.problems(config)
    yield from hosts.problems(config)


def _bad_numbers(config: Config) -> Iterable[tuple[str, str]]:
    """Yield the keys whose numbers are out of range."""
    for key, limits in _RANGES.items():
        value = getattr(config, key)
        if limits.least is not None and isinstance(value, int | float) and not value >= limits.least:
            yield key, f"must be at least {limits.least}, not {value}"
    for key in _HINTS:
        value = getattr(config, key)
        if value == "":
            yield key, "is an empty text: give a value, or leave the key out"
        if any(isinstance(number, float) and not math.isfinite(number) for number in _numbers(value)):
            yield key, f"must be a finite number, not {value}"
        limits = _RANGES.get(key, Range())
        most = limits.most or (_LARGEST if type(value) is int else math.inf)
        if isinstance(value, int | float) and value > most:
            yield key, f"must be at most {most}, not {value}"
        if limits.above is not None and not all(number > limits.above for number in _numbers(value)):
            yield key, f"must be above {limits.above}, not {value}"
        if limits.below is not None and not all(number < limits.below for number in _numbers(value)):
            yield key, f"must be below {limits.below}, not {value}"


def _numbers(value: Any) -> list[int | float]:
    """Return the numbers in a key's value."""
    values = value if isinstance(value, tuple) else (value,)
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]


def _bad_lists(config: Config) -> Iterable[tuple[str, str]]:
    if list(config.lr_step) != sorted(set(config.lr_step)):
        yield "lr_step", f"must rise: {list(config.lr_step)}"
    if any(isinstance(at, float) for at in config.lr_step) and not all(0 < at < 1 for at in config.lr_step):
        yield "lr_step", f"has whole epochs, or shares of the run above 0 and below 1: {list(config.lr_step)}"
    elif any(at < 0 for at in config.lr_step):
        yield "lr_step", f"must have epochs of at least 0: {list(config.lr_step)}"
    yield from _bad_channels(config)
    yield from _bad_class_weights(config)
    for pattern, factor in config.learning_rates.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            yield "learning_rates", f"must have finite factors of at least 0: {pattern}: {factor!r}"
    for key in ("model_args", "optimizer_args", "rule_args", "crop_args", "auto_augment_args"):
        if not _survives_json(getattr(config, key)):
            yield key, f"must hold values that JSON can store, with text as keys: {getattr(config, key)}"
    try:
        args_of(config)
    except UserError as error:
        yield "optimizer_args", f"can't be used: {error}"


def _bad_channels(config: Config) -> Iterable[tuple[str, str]]:
    """Yield the keys that do not suit the channels of the images, as far as these are known yet."""
    n_channels = config.n_channels or 3
    each = (
        "3 numbers{}, for R, G and B"
        if n_channels == 3
        else f"{n_channels} numbers{{}}, one for each channel"
    )
    is_known = config.n_channels or config.data is None
    mean, scale = config.subtract_mean, config.scale
    if isinstance(mean, tuple):
        in_range = all(0 <= number <= 255 for number in mean)
        if not in_range or (is_known and len(mean) != n_channels):
            yield "subtract_mean", f"as a list has {each.format(' from 0 to 255')}: {list(mean)}"
    if isinstance(scale, tuple) and is_known and len(scale) != n_channels:
        yield "scale", f"as a list has {each.format('')}: {list(scale)}"
    if config.rand_color and n_channels != 3:
        yield "rand_color", f"is for images with 3 channels, not {n_channels}"
    if config.n_channels is not None and config.n_channels > _MOST_CHANNELS:
        yield "n_channels", f"must be 1 to {_MOST_CHANNELS}, not {config.n_channels}"


def _bad_datasets(config: Config) -> Iterable[tuple[str, str]]:
    """Yield the keys about datasets that are Python objects that can't work."""
    for key in ("input_size", "item_size"):
        size = getattr(config, key)
        if isinstance(size, tuple) and (len(size) != 2 or min(size) < 1):
            yield key, f"as a list has 2 numbers above 0, rows and columns: {list(size)}"
    if config.data is None:
        if config.item_size is not None:
            yield "item_size", "is for datasets of `data`: set it, or leave item_size out"
        return
    if not _OWN_FUNCTION.fullmatch(config.data):
        yield "data", f"is not of the form package.module:function: {config.data!r} (a folder is data_folder)"
    if config.subtract_mean == "image":
        yield (
            "subtract_mean",
            "image is for dataset folders; datasets of `data` have a mean of each channel",
        )
    if config.check_sums:
        yield "check_sums", "is for dataset folders, which have checksums, not for `data`"


def _bad_class_weights(config: Config) -> Iterable[tuple[str, str]]:
    given = config.class_weights
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else ()
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            yield "class_weights", f"must be finite numbers of at least 0: {value!r}"


def _bad_combinations(config: Config) -> Iterable[tuple[str, str]]:
    if config.resume_train == "auto" and config.run_name is None:
        yield "resume_train", "auto needs run_name, the run to start or resume"
    if config.loader_restarts not in ("auto", 0) and not config.para_load:
        yield "loader_restarts", "needs para_load: true, because other runs have no loader process"
    if config.sampler and config.shuffle != "blocks":
        yield "sampler", f"draws single images in random order: set shuffle: blocks, not {config.shuffle}"
    if config.loss and config.label_smoothing:
        yield "label_smoothing", "is for cross-entropy: set it to 0, and smooth labels in your own loss"
    if config.loss and not _OWN_FUNCTION.fullmatch(config.loss):
        yield "loss", f"is <package.module>:<function>, not {config.loss!r}"
    if config.use_nesterov_momentum and not (config.use_momentum and config.momentum > 0):
        yield "use_nesterov_momentum", "needs use_momentum: true and a momentum above 0"
    if config.use_nesterov_momentum and config.optimizer != "sgd":
        yield "use_nesterov_momentum", f"is for optimizer: sgd, not {config.optimizer}"
    if config.new_head and config.pretrained is None:
        yield "new_head", "needs `pretrained`, the weights to start from"
    is_unchanged = not (config.new_head or config.pretrained_allow or config.pretrained_channels == "bgr")
    if config.pretrained_part == "whole" and not is_unchanged:
        others = "new_head, pretrained_allow or pretrained_channels: bgr"
        yield "pretrained_part", f"whole continues a training unchanged: it can't be combined with {others}"
    if config.warm_up_epochs >= config.n_epochs:
        yield "warm_up_epochs", f"must be below n_epochs, {config.n_epochs}: {config.warm_up_epochs:g}"
    if config.lr_policy == "auto" and config.val_freq > 1:
        yield "val_freq", "must be 1 with lr_policy: auto, which compares the errors of consecutive epochs"
    if config.layer_decay is not None and config.layer_decay > 1:
        yield "layer_decay", f"must be at most 1, not {config.layer_decay:g}"
    if config.min_lr > config.learning_rate:
        yield "min_lr", f"must be at most learning_rate, {config.learning_rate:g}: {config.min_lr:g}"
    for other in ("compile", "sync_batch_norm"):
        if config.recompute and getattr(config, other):
            yield "recompute", f"can't be combined with {other}: set one of them to false"
    if config.recompute and config.cuda_graph is True:
        yield "recompute", "can't be captured: set cuda_graph: false"
    if config.cuda_graph is True and config.augment_on == "loader":
        yield "cuda_graph", "needs augment_on: trainer, which puts every batch at the same address"
    if config.upload == "trainer" and config.augment_on == "loader" and config.para_load:
        yield "upload", "trainer gives the loader no GPU: augment_on must be trainer"
    if config.cuda_graph is True and config.accumulate > 1:
        yield "cuda_graph", "captures steps of one batch: set accumulate: 1 and a larger batch_size"
    if config.run_name is not None and not _RUN_NAME.fullmatch(config.run_name):
        form = "is a folder's name inside weights_dir, up to 255 letters, digits and -_.+"
        yield "run_name", f"{form}: {config.run_name!r}"


def _survives_json(value: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
