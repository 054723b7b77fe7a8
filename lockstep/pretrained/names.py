"""Translation of the names that other programs give to a network's tensors."""

import re
from collections.abc import Mapping

import torch
from torch import nn

# Caffe stores a layer's weights as blob 0 and its biases as blob 1: 'conv1/blobs/0', 'conv1.blobs.0'.
_BLOB = re.compile(r"(.+)[./]blobs[./]([01])")
# The two nn.Sequential of torchvision's AlexNet and VGG: 'features.0.weight', 'classifier.6.bias'.
_SEQUENTIAL = re.compile(r"(features|classifier)\.(\d+)\.(weight|bias)")
_BLOBS = {"0": "weight", "1": "bias"}


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of all convolutions and linear layers, in the order of their construction."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a network's tensors as in Lockstep's checkpoints: tied parameters once, with all buffers."""
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def translate(
    tensors: dict[str, torch.Tensor], ours: Mapping[str, torch.Tensor], layers: list[str]
) -> tuple[dict[str, torch.Tensor], str]:
    """Rename the tensors of Caffe or torchvision to the network's names.

    Args:
        tensors: The pretrained tensors by their names.
        ours: The network's state dict.
        layers: The network's `layers_of`.

    Returns:
        The renamed tensors, unknown names unchanged, and a description of the format.
    """
    if any(_BLOB.fullmatch(name) for name in tensors):
        renamed = {_without_blob(name): value for name, value in tensors.items()}
        return {
            name: _without_ones(value, ours.get(name)) for name, value in renamed.items()
        }, "Caffe's blobs"
    if tensors.keys().isdisjoint(ours) and any(_SEQUENTIAL.fullmatch(name) for name in tensors):
        places = _places(tensors, layers)
        return {places.get(name, name): value for name, value in tensors.items()}, "torchvision's sequences"
    return tensors, "a state dict"


def _without_blob(name: str) -> str:
    match = _BLOB.fullmatch(name)
    return f"{match[1]}.{_BLOBS[match[2]]}" if match else name


def _without_ones(blob: torch.Tensor, ours: torch.Tensor | None) -> torch.Tensor:
    """Remove leading axes of length 1: Caffe before 2015 gave every blob four axes."""
    while ours is not None and blob.ndim > ours.ndim and blob.shape[0] == 1:
        blob = blob[0]
    return blob


def _places(tensors: dict[str, torch.Tensor], layers: list[str]) -> dict[str, str]:
    """Map torchvision's layers to ours by position: features before classifier, each by number."""
    matches = [match for match in map(_SEQUENTIAL.fullmatch, tensors) if match]
    theirs = sorted({(match[1] == "classifier", int(match[2])) for match in matches})
    ours = dict(zip(theirs, layers, strict=False))
    return {
        match[0]: f"{ours[place]}.{match[3]}"
        for match in matches
        if (place := (match[1] == "classifier", int(match[2]))) in ours
    }
