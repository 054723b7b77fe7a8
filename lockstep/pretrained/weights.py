"""Loading of pretrained weights into a trainer's network before its first step."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from lockstep.config import Config
from lockstep.config.rules import KINDS_OF_RULES, discarded_replicas
from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths
from lockstep.network.arena import Arena
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained import theano_folder
from lockstep.pretrained.files import read_state_dict
from lockstep.pretrained.heads import class_tensors
from lockstep.pretrained.match import compare
from lockstep.pretrained.names import layers_of, tensors_of, translate
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint_files import find_checkpoint, verify_checksum

_OF_MODEL = ("weights/", "buffers/", "ema/")  # prefixes in checkpoints of the network's tensors


@dataclass
class Pretrained:
    """The contents of a file or folder of weights.

    Attributes:
        source: The path and the format, for messages.
        weights: The network's parameters and buffers.
        own: Whether they have the names of Lockstep's checkpoints (`tensors_of`) instead of a state dict's.
        state: With `pretrained_part: whole`, all tensors of a trainer's arena.
        of_rule: With `pretrained_part: whole`, the rule's tensors in the checkpoint.
        record: With `pretrained_part: whole`, the validation results of all trained epochs.
        notes: Lines for the user. `start_with` adds the report of what fits.
    """

    source: str
    weights: dict[str, torch.Tensor]
    own: bool = False
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    of_rule: dict[str, torch.Tensor] = field(default_factory=dict)
    record: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def start_with(config: Config, model: nn.Module, arena: Arena) -> Pretrained:
    """Copy the weights of `config.pretrained` into the network.

    Args:
        config: The run's configuration.
        model: The network, whose tensors are in the arena.
        arena: The trainer's arena.

    Returns:
        The loaded weights, with a report in `notes`.

    Raises:
        UserError: The weights can't be read or do not fit. The network is unchanged then.
    """
    loaded = _find(config, model)
    if config.pretrained_channels == "bgr":
        _reverse_channels(model, loaded)
    ours = tensors_of(model) if loaded.own else model.state_dict()
    replaced = class_tensors(config) if config.new_head else ()
    match = compare(loaded.weights, ours, replaced, config.pretrained_allow)
    if any(match.problems.values()):
        match.check(loaded.source, config.model, class_tensors(config))
    averages = [name for name in arena.tensors if name.startswith("ema/")]
    if loaded.state:
        begun = {name: loaded.weights[name.partition("/")[2]] for name in averages}
        arena.load(begun | loaded.state, loaded.source)
    else:
        for name in match.fitting:
            ours[name].copy_(loaded.weights[name])
        for name in averages:
            arena.tensors[name].copy_(tensors_of(model)[name.partition("/")[2]])
    loaded.notes.extend(match.lines())
    return loaded


def weights_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the network's tensors in a checkpoint, under the network's names.

    With `ema_decay` they are the moving averages, which were validated.
    """
    kinds = {kind: {n[len(kind) :]: v for n, v in state.items() if n.startswith(kind)} for kind in _OF_MODEL}
    return kinds["weights/"] | kinds["buffers/"] | kinds["ema/"]


@refusing_unusable_paths()
def _find(config: Config, model: nn.Module) -> Pretrained:
    """Read `pretrained` in the format that its content shows."""
    assert config.pretrained is not None
    path = Path(config.pretrained)
    if (path / "checkpoints").is_dir():
        best, notices = find_checkpoint(path, config.pretrained_epoch)
        loaded = _from_checkpoint(config, best.path)
        loaded.notes.extend(notices)
        return loaded
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
    return Pretrained(f"{path} ({kind})", weights, notes=notes)


def _from_checkpoint(config: Config, path: Path) -> Pretrained:
    """Read a checkpoint of Lockstep. Without its JSON file, only the weights can be read."""
    record = path.with_suffix(".json")
    if config.pretrained_part == "weights":
        if record.exists():
            verify_checksum(record)
        return Pretrained(f"{path} (a checkpoint)", weights_of(checkpoint.load(path)), own=True)
    state = verify_checksum(record).state
    then = state.config.get("optimizer", config.optimizer)
    if then != config.optimizer:  # the state of sgd fits lars, which scales it otherwise
        raise UserError(
            f"{path}: was made with optimizer: {then}, the configuration says {config.optimizer}; "
            "pretrained_part: weights starts a new training with its weights"
        )
    if not state.is_validated:
        when = "after an epoch without validation" if state.is_complete else "within an epoch"
        raise UserError(
            f"{path}: was saved {when}: resume_train=True resumes it; pretrained_part: weights "
            "starts a new training with its weights"
        )
    tensors = checkpoint.load(path)
    weights = weights_of(tensors)
    of_rule = {name: tensors.pop(name) for name in [*tensors] if name.startswith(KINDS_OF_RULES)}
    note = discarded_replicas(state.config.get("rule", ""), state.n_trainers, config)
    notes = [note] if note else []
    return Pretrained(f"{path} (a checkpoint)", weights, True, tensors, of_rule, state.val_record, notes)


def _from_theano(config: Config, path: Path, names: list[str]) -> Pretrained:
    epoch = config.pretrained_epoch
    epoch = theano_folder.newest_epoch(path) if epoch == "latest" else epoch
    lib_conv = config.pretrained_lib_conv or theano_folder.lib_conv_of(path)
    arrays = theano_folder.read_arrays(path, epoch)
    weights = _named(theano_folder.join(arrays, lib_conv), names)
    turned = "filters rotated" if lib_conv == "cudnn" else "filters unchanged"
    loaded = Pretrained(f"{path} (theano_alexnet's epoch {epoch})", weights)
    loaded.notes.append(f"trained with lib_conv: {lib_conv}: {turned}; weights behind a dropout are halved")
    if config.model == "alexnet" and config.model_args.get("variant") != "theano_alexnet":
        loaded.notes.append("theano_alexnet's network is alexnet with model_args={variant: theano_alexnet}")
    if config.pretrained_part == "weights":
        return loaded
    progress = theano_folder.read_progress(path, epoch, lib_conv, arrays)
    momenta = _named(progress.momenta, names)
    loaded.state = {f"weights/{name}": value for name, value in weights.items()}
    loaded.state |= {f"momenta/{name}": value for name, value in momenta.items()}
    loaded.record = [
        {"epoch": number, "loss": loss, "error_top1": error}
        for number, (error, loss) in enumerate(progress.errors, 1)
    ]
    ours = learning_rate(config, epoch + 1, [error for error, _ in progress.errors])
    if abs(ours / progress.learning_rate - 1) > 1e-5:
        loaded.notes.append(
            f"theano_alexnet would continue at a learning rate of {progress.learning_rate:g}, "
            f"this run continues at {ours:g} (learning_rate, lr_policy, lr_step)"
        )
    return loaded


def _named(layers: list[theano_folder.LayerArrays], names: list[str]) -> dict[str, torch.Tensor]:
    """Name the layers' tensors; layers beyond those of the network get their number, for the report."""
    names = names + [f"layer_{number}" for number in range(len(names), len(layers))]
    named = {}
    for name, layer in zip(names, layers, strict=False):
        named[f"{name}.weight"] = torch.from_numpy(layer.weight.copy())  # torch has no negative strides
        named[f"{name}.bias"] = torch.from_numpy(layer.bias)
    return named


def _reverse_channels(model: nn.Module, loaded: Pretrained) -> None:
    """Reverse the input channels of the first convolution, from BGR to RGB."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == 3 and f"{name}.weight" in loaded.weights:
            weight = loaded.weights[f"{name}.weight"]
            if weight.shape == module.weight.shape:  # other shapes are refused later
                loaded.weights[f"{name}.weight"] = weight.flip(1)
                loaded.notes.append(f"{name}.weight: input channels reversed from BGR to RGB")
            return
    raise UserError("pretrained_channels: bgr: the network has no convolution that takes three channels")
