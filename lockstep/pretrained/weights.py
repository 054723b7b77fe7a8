"""What `pretrained` names, put into a trainer's network before its first step."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.network.arena import Arena
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained import theano_folder
from lockstep.pretrained.files import read_state_dict
from lockstep.pretrained.heads import class_tensors
from lockstep.pretrained.match import compare
from lockstep.pretrained.names import layers_of, tensors_of, translate
from lockstep.runs import checkpoint
from lockstep.runs.folder import find_checkpoint, verify

_OF_MODEL = (
    "weights/",
    "buffers/",
    "ema/",
)  # what is not the optimizer's


@dataclass
class Found:
    """What a file or folder holds.

    source: what and where it is, for people. weights: the network's parameters and buffers. own: whether they
    have the names of Lockstep's checkpoints (`tensors_of`) rather than of state dicts. state: all that a
    trainer's arena holds, where `pretrained_part: whole` asks for it. record: validation of the epochs that
    were trained, likewise. notes: lines for the user; after the start, the report.
    """

    source: str
    weights: dict[str, torch.Tensor]
    own: bool = False
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    record: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def start_with(config: Config, model: nn.Module, arena: Arena) -> Found:
    """Copies what `config.pretrained` names into the network, whose tensors lie in the arena.

    Raises UserError where it can't be read or does not fit; then nothing is changed.
    """
    found = _find(config, model)
    if config.pretrained_channels == "bgr":
        _turn_channels(model, found)
    ours = tensors_of(model) if found.own else model.state_dict()
    replaced = class_tensors(config) if config.finetune else ()
    match = compare(found.weights, ours, replaced, config.pretrained_allow)
    if any(match.problems.values()):
        match.check(found.source, config.model, class_tensors(config))
    averages = [name for name in arena.tensors if name.startswith("ema/")]
    if found.state:
        begun = {name: found.weights[name.partition("/")[2]] for name in averages}
        arena.load(begun | found.state, found.source)
    else:
        for name in match.fitting:
            ours[name].copy_(found.weights[name])
        for name in averages:
            arena.tensors[name].copy_(tensors_of(model)[name.partition("/")[2]])
    found.notes.extend(match.lines())
    return found


def weights_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The network's tensors in a checkpoint, under their own names.

    Where it has moving averages (`ema_decay`), those: they are what was validated.
    """
    kinds = {kind: {n[len(kind) :]: v for n, v in state.items() if n.startswith(kind)} for kind in _OF_MODEL}
    return kinds["weights/"] | kinds["buffers/"] | kinds["ema/"]


def _find(config: Config, model: nn.Module) -> Found:
    """Tells by what is there what `pretrained` is."""
    assert config.pretrained is not None
    path = Path(config.pretrained)
    if (path / "checkpoints").is_dir():
        best, notices = find_checkpoint(path, config.pretrained_epoch)
        found = _from_checkpoint(config, best.path)
        found.notes.extend(notices)
        return found
    if path.is_dir() and theano_folder.is_folder(path):
        return _from_theano(config, path, layers_of(model))
    if path.is_dir():
        what = "a run's folder (it has no checkpoints) or theano_alexnet's (no W_0_<epoch>.npy)"
        raise UserError(f"{path}: is not {what}: pretrained takes such folders, .safetensors and .pth")
    tensors = read_state_dict(path)
    if any(name.startswith("weights/") for name in tensors):
        return _from_checkpoint(config, path)
    if config.pretrained_part == "whole":
        raise UserError(
            f"{path}: holds weights alone: pretrained_part: whole needs a checkpoint of a training"
        )
    weights, kind = translate(tensors, model.state_dict(), layers_of(model))
    notes = []
    if kind == "Caffe's blobs" and config.pretrained_channels == "rgb":
        notes.append("channels are taken as RGB; Caffe's own networks take BGR: pretrained_channels: bgr")
    return Found(f"{path} ({kind})", weights, notes=notes)


def _from_checkpoint(config: Config, path: Path) -> Found:
    """A checkpoint of Lockstep; without the JSON file beside it, its weights alone."""
    record = path.with_suffix(".json")
    if config.pretrained_part == "weights":
        if record.exists():
            verify(record)
        return Found(f"{path} (a checkpoint)", weights_of(checkpoint.load(path)), own=True)
    state = verify(record).state
    if len(state.val_record) != state.epoch:
        raise UserError(
            f"{path}: was saved within an epoch: resume_train=True goes on there; pretrained_part: weights "
            "begins anew with its weights"
        )
    tensors = checkpoint.load(path)
    return Found(f"{path} (a checkpoint)", weights_of(tensors), True, tensors, state.val_record)


def _from_theano(config: Config, path: Path, names: list[str]) -> Found:
    epoch = config.pretrained_epoch
    epoch = theano_folder.newest_epoch(path) if epoch == "latest" else epoch
    lib_conv = config.pretrained_lib_conv or theano_folder.lib_conv_of(path)
    arrays = theano_folder.read_arrays(path, epoch)
    weights = _named(theano_folder.join(arrays, lib_conv), names)
    turned = "filters turned" if lib_conv == "cudnn" else "filters as they are"
    found = Found(f"{path} (theano_alexnet's epoch {epoch})", weights)
    found.notes.append(f"trained with lib_conv: {lib_conv}: {turned}; weights behind a dropout are halved")
    if config.model == "alexnet" and config.model_args.get("variant") != "theano_alexnet":
        found.notes.append("theano_alexnet's network is alexnet with model_args={variant: theano_alexnet}")
    if config.pretrained_part == "weights":
        return found
    progress = theano_folder.read_progress(path, epoch, lib_conv, arrays)
    momenta = _named(progress.momenta, names)
    found.state = {f"weights/{name}": value for name, value in weights.items()}
    found.state |= {f"momenta/{name}": value for name, value in momenta.items()}
    found.record = [
        {"epoch": number, "loss": loss, "error_top1": error}
        for number, (error, loss) in enumerate(progress.errors, 1)
    ]
    ours = learning_rate(config, epoch + 1, [error for error, _ in progress.errors])
    if abs(ours / progress.learning_rate - 1) > 1e-5:
        found.notes.append(
            f"theano_alexnet would go on at a learning rate of {progress.learning_rate:g}, this run goes on "
            f"at {ours:g} (learning_rate, lr_policy, lr_step)"
        )
    return found


def _named(layers: list[theano_folder.Layer], names: list[str]) -> dict[str, torch.Tensor]:
    """Layers by our names; those that the network does not have by their numbers, for the report."""
    names = names + [f"layer_{number}" for number in range(len(names), len(layers))]
    named = {}
    for name, layer in zip(names, layers, strict=False):
        named[f"{name}.weight"] = torch.from_numpy(layer.weight.copy())  # torch knows no negative strides
        named[f"{name}.bias"] = torch.from_numpy(layer.bias)
    return named


def _turn_channels(model: nn.Module, found: Found) -> None:
    """Weights for BGR pictures to weights for RGB: the first convolution's input channels the other way."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == 3 and f"{name}.weight" in found.weights:
            weight = found.weights[f"{name}.weight"]
            if weight.shape == module.weight.shape:  # what does not fit may be of any size
                found.weights[f"{name}.weight"] = weight.flip(1)
                found.notes.append(f"{name}.weight: input channels turned from BGR to RGB")
            return
    raise UserError("pretrained_channels: bgr: the network has no convolution that takes three channels")
