"""The tensors of a network that depend on the number of classes: its last layer or layers."""

from collections.abc import Mapping

import torch

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.network.build import build_model


def class_tensors(config: Config) -> dict[str, int]:
    """Return the tensors whose shape depends on the number of classes, each with its axis of classes.

    The network is built for two numbers of classes and compared. This finds the last layer of any network,
    and auxiliary classifiers too.
    """
    fewer, more = (_shapes(config, n_classes) for n_classes in (2, 3))
    return {
        name: axis
        for name, shape in fewer.items()
        for axis, length in enumerate(shape)
        if (length, more[name][axis]) == (2, 3)
    }


def count_classes(config: Config, tensors: Mapping[str, torch.Tensor], source: str) -> int:
    """Return the number of classes of a state dict. Raise UserError if it is not of this model."""
    counts = {tensors[name].shape[axis] for name, axis in class_tensors(config).items() if name in tensors}
    if len(counts) != 1:
        raise UserError(f"{source}: is not of model {config.model}: it has no last layer of that network")
    return counts.pop()


def _shapes(config: Config, n_classes: int) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in build_model(config, n_classes).state_dict().items()}
