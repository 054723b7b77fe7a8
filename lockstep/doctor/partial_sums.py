"""The memory for partial sums of gradients that `logical_ranks` and `shares` need."""

import dataclasses
from collections.abc import Iterator

from lockstep.backends.devices import on_gpus
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.data.dataset import open_dataset
from lockstep.doctor.report import Finding
from lockstep.memory.limits import allowed_bytes

_FLOAT_BYTES = 4


def describe(config: Config, devices: tuple[str, ...]) -> Iterator[Finding]:
    """Yield a line about the partial sums of a run, if its configuration has `logical_ranks`.

    Args:
        config: The run's.
        devices: Those that the run would use.

    Raises:
        UserError: The devices can't share the logical ranks, or there is no dataset.
    """
    if config.logical_ranks is None:
        return
    from lockstep.network.build import build_model  # they import torch, which may be broken
    from lockstep.network.logical_ranks import n_partial_sums

    config, _ = settle(dataclasses.replace(config, devices=devices))
    model = build_model(config, open_dataset(config).n_classes)
    tensors = [value for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()]
    n_bytes, n_sums = _FLOAT_BYTES * sum(value.numel() for value in tensors), n_partial_sums(config)
    text = (
        f"{len(devices)} trainer(s) keep {n_sums} partial sum(s) of gradients of {n_bytes / 1e6:,.1f} MB each"
    )
    if on_gpus(devices):  # one device for each trainer
        yield Finding("logical ranks", text)
        return
    total, allowed = len(devices) * n_sums * n_bytes, allowed_bytes()
    fits = total <= allowed
    advice = "" if fits else ": set shares: equal, or use fewer devices"
    text = f"{text}, {total / 1e6:,.1f} MB in all of {allowed / 1e6:,.0f} MB"
    yield Finding("logical ranks", text + advice, wrong=not fits)
