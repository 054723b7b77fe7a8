"""What others call the tensors of a network, and what this network calls them."""

import re
from collections.abc import Mapping

import torch
from torch import nn

# Caffe keeps a layer's weights as its blob 0 and its biases as blob 1: 'conv1/blobs/0', 'conv1.blobs.0'.
_BLOB = re.compile(r"(.+)[./]blobs[./]([01])")
# The two nn.Sequential of torchvision's AlexNet and VGG: 'features.0.weight', 'classifier.6.bias'.
_SEQUENTIAL = re.compile(r"(features|classifier)\.(\d+)\.(weight|bias)")
_BLOBS = {"0": "weight", "1": "bias"}


def layers_of(model: nn.Module) -> list[str]:
    """The names of all convolutions and fully connected layers, in the order in which they were made."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of Lockstep has of a network: a state dict, but with tied parameters once, and with
    buffers that state dicts leave out."""
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def translate(
    tensors: dict[str, torch.Tensor], ours: Mapping[str, torch.Tensor], layers: list[str]
) -> tuple[dict[str, torch.Tensor], str]:
    """Gives tensors the network's names where their own are Caffe's or torchvision's, and says so.

    ours: the network's state dict; layers: `layers_of` it. Names that mean nothing are kept, for the report
    to show.
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
    """Caffe before 2015 had four dimensions for everything: (1, 1, 4096, 9216), (1, 1, 1, 96)."""
    while ours is not None and blob.ndim > ours.ndim and blob.shape[0] == 1:
        blob = blob[0]
    return blob


def _places(tensors: dict[str, torch.Tensor], layers: list[str]) -> dict[str, str]:
    """Their k-th layer is our k-th: features before classifier, each by number."""
    matches = [match for match in map(_SEQUENTIAL.fullmatch, tensors) if match]
    theirs = sorted({(match[1] == "classifier", int(match[2])) for match in matches})
    ours = dict(zip(theirs, layers, strict=False))
    return {
        match[0]: f"{ours[place]}.{match[3]}"
        for match in matches
        if (place := (match[1] == "classifier", int(match[2]))) in ours
    }
