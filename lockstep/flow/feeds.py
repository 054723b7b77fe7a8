"""The feed of a ParallelExecutor: from dictionaries by argument names to the batch of each device."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.errors import UserError, nearest

Feed = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Batch = list[torch.Tensor]


def batch_names(function: Callable[..., Any], what: str) -> list[str]:
    """Return the names of a function's arguments after the model."""
    if not callable(function):
        raise UserError(f"{what} is a function of the model and a batch, not {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UserError(f"{what} takes *args: name the arguments that the feed gives: {what}(model, images)")
    taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(taken) < 2:
        raise UserError(f"{what} takes the model and a batch: {what}(model, images, labels)")
    return taken[1:]


def split_feed(feed: Feed, names: list[str], n_devices: int) -> list[Batch]:
    """Return the batch of each device, in the order of the names; empty for a device without samples.

    A dictionary is split as evenly as possible; the first devices have one sample more.

    Raises:
        UserError: Names differ, numbers of samples differ, there are no samples, or a list has a wrong
            length.
    """
    if isinstance(feed, Mapping):
        whole = _batch(feed, names)
        n_samples = len(whole[0])
        if not n_samples:
            raise UserError("the feed has no samples: give at least one")
        sizes = [n_samples // n_devices + (d < n_samples % n_devices) for d in range(n_devices)]
        parts = [torch.split(tensor, sizes) for tensor in whole]
        return [[part[d] for part in parts] if sizes[d] else [] for d in range(n_devices)]
    if not isinstance(feed, Sequence) or not all(isinstance(each, Mapping) for each in feed):
        raise UserError(
            "the feed is a dictionary by the names of the loss's arguments, or a list of one for each device"
        )
    if len(feed) != n_devices:
        raise UserError(f"the feed is a list for {len(feed)} devices: there are {n_devices}, give one each")
    batches = [_batch(each, names) if each else [] for each in feed]
    batches = [batch if batch and len(batch[0]) else [] for batch in batches]
    if not any(batches):
        raise UserError("the feed has no samples: give at least one device at least one")
    return batches


def _batch(feed: Mapping[str, Any], names: list[str]) -> Batch:
    for name in feed:
        if name not in names:
            raise UserError(f"the feed has '{name}'{nearest(str(name), names)}: it takes {', '.join(names)}")
    missing = [name for name in names if name not in feed]
    if missing:
        raise UserError(f"the feed lacks {', '.join(missing)}: it takes {', '.join(names)}")
    batch = [_tensor(name, feed[name]) for name in names]
    for name, tensor in zip(names, batch, strict=True):
        if tensor.layout is not torch.strided:
            raise UserError(f"the feed's '{name}' is sparse: give a dense tensor (to_dense)")
        if not tensor.dim():
            raise UserError(f"the feed's '{name}' is one number: its first dimension must be the samples'")
        if len(tensor) != len(batch[0]):
            raise UserError(
                f"the feed has {len(batch[0])} samples of {names[0]} and {len(tensor)} of {name}: "
                "give as many of each"
            )
    return batch


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the feed's '{name}' can't be made a tensor: {error}") from error
