"""Writes a run's weights for other programs.

    python -m lockstep.export runs/try1 --to safetensors       a state dict, with class names and mean
    python -m lockstep.export runs/try1 --to torchvision       a .pth that load_state_dict takes
    python -m lockstep.export runs/try1 --to theano_alexnet    its folder of .npy files, to resume from there
    python -m lockstep.export runs/try1 --to onnx              needs the packages onnx and onnxscript
    python -m lockstep.export runs/try1 --to onnx --epoch 12 --out net.onnx

Nothing that exists is overwritten. docs/weights.md says what is in each. Exit code: 0, or 2 where something
given can't be used.
"""

import argparse
import importlib.util
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from lockstep.config import Config, Layer, resolve
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.errors import UserError
from lockstep.files import publish
from lockstep.network.build import build_model, input_spec_of
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained import theano_folder
from lockstep.pretrained.heads import class_tensors, count_classes
from lockstep.pretrained.match import compare
from lockstep.pretrained.names import tensors_of
from lockstep.pretrained.weights import weights_of
from lockstep.runs import checkpoint
from lockstep.runs.folder import Checkpoint, find_checkpoint

ENDINGS = {
    "safetensors": ".safetensors",
    "torchvision": ".pth",
    "theano_alexnet": "-theano_alexnet",
    "onnx": ".onnx",
}


@dataclass(frozen=True)
class Trained:
    """A network as a run's checkpoint has it, on the CPU. tensors: all of the checkpoint, by its names."""

    checkpoint: Checkpoint
    config: Config
    model: nn.Module
    n_classes: int
    tensors: dict[str, torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--to", required=True, choices=ENDINGS, help="what to write: see above")
    parser.add_argument("--epoch", type=int, help="the checkpoint of this epoch (the newest whole one)")
    parser.add_argument(
        "--out", type=Path, help="the file or folder to make (in this folder, named after run and epoch)"
    )
    lib_conv = "for --to theano_alexnet: its key lib_conv, which says whether filters are flipped (cudnn)"
    parser.add_argument("--lib-conv", choices=("cudnn", "cudaconvnet"), help=lib_conv)
    words = parser.parse_args()
    try:
        if words.lib_conv and words.to != "theano_alexnet":
            raise UserError(f"--lib-conv {words.lib_conv} is for --to theano_alexnet, not for {words.to}")
        trained = load_trained(words.run, "latest" if words.epoch is None else words.epoch)
        name = f"{words.run.resolve().name}-{trained.checkpoint.state.name}{ENDINGS[words.to]}"
        out = words.out or Path(name)
        for line in export(trained, words.to, out, words.lib_conv or "cudnn"):
            print(line)
    except UserError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    what = f"model {trained.config.model}, {trained.n_classes} classes"
    print(f"wrote {out}: {what}, from {trained.checkpoint.path}")
    return 0


def load_trained(run: Path, epoch: int | str) -> Trained:
    """The network of a run's checkpoint, ready to be used. Raises UserError naming what is not whole."""
    found, _ = find_checkpoint(run, epoch)
    config, _ = resolve([Layer(str(found.path.with_suffix(".json")), found.state.config)])
    tensors = checkpoint.load(found.path)
    weights = weights_of(tensors)
    n_classes = count_classes(config, weights, str(found.path))
    model = build_model(config, n_classes)
    ours = tensors_of(model)
    match = compare(weights, ours)
    match.check(str(found.path), config.model, class_tensors(config) if any(match.problems.values()) else ())
    for name, tensor in ours.items():
        tensor.copy_(weights[name])
    return Trained(found, config, model.eval(), n_classes, tensors)


def export(trained: Trained, to: str, out: Path, lib_conv: theano_folder.LibConv = "cudnn") -> list[str]:
    """Writes `out`, whole or not at all. Returns lines for the user.

    Raises UserError where `out` exists or can't be written, or the network has no such form.
    """
    if out.exists():
        raise UserError(f"{out}: already exists; --out names another place")
    temporary = out.with_name(f".{out.name}.unfinished")
    try:
        if to == "theano_alexnet":
            layers, progress = theano_form(trained)
            temporary.mkdir()
            theano_folder.write(temporary, trained.checkpoint.state.epoch, lib_conv, layers, progress)
            temporary.rename(out)
            return []
        notes = _WRITERS[to](trained, temporary)
        publish(temporary, out)
        return notes
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch's, for a full disk too
        raise UserError(f"{out}: can't be written: {' '.join(str(error).split())}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def write_safetensors(trained: Trained, path: Path) -> list[str]:
    """The state dict, and in its metadata what is needed to use it, as JSON by name."""
    state = {name: value.contiguous().clone() for name, value in trained.model.state_dict().items()}
    facts, notes = describe(trained)
    save_file(state, path, {name: json.dumps(value) for name, value in facts.items()})
    return notes


def write_pth(trained: Trained, path: Path) -> list[str]:
    """The state dict as torch.save writes it; torch.load reads it with weights_only."""
    torch.save({name: value.contiguous() for name, value in trained.model.state_dict().items()}, path)
    return []


def write_onnx(trained: Trained, path: Path) -> list[str]:
    """Images (batch, 3, rows, columns), prepared as for training, to logits (batch, classes)."""
    absent = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f"--to onnx needs the package(s) {', '.join(absent)}: pip install {' '.join(absent)}")
    size = input_spec_of(trained.model, trained.config).size
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that nothing here needs
    with warnings.catch_warnings(action="ignore"):  # torch's, of its own deprecated functions
        torch.onnx.export(
            trained.model,
            (torch.zeros(2, 3, size, size),),
            path,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )
    return []


_WRITERS: dict[str, Callable[[Trained, Path], list[str]]] = {
    "safetensors": write_safetensors,
    "torchvision": write_pth,
    "onnx": write_onnx,
}


def theano_form(trained: Trained) -> tuple[list[theano_folder.Layer], theano_folder.Progress | None]:
    """The network as theano_alexnet has it, and its progress where the checkpoint has momenta.

    Raises UserError for a network that theano_alexnet could not have, or a checkpoint from within an epoch.
    """
    state, config, tensors = trained.checkpoint.state, trained.config, trained.tensors
    if len(state.val_record) != state.epoch:
        raise UserError(f"{trained.checkpoint.path}: was saved within an epoch; --epoch names a complete one")
    groups = _chain_of(trained.model, config.model)
    named = {f"{name}.{kind}" for name in groups for kind in ("weight", "bias")}

    def layers_in(tensors: Mapping[str, torch.Tensor]) -> list[theano_folder.Layer]:
        return [
            theano_folder.Layer(tensors[f"{name}.weight"].numpy(), tensors[f"{name}.bias"].numpy(), n_groups)
            for name, n_groups in groups.items()
        ]

    weights = layers_in(trained.model.state_dict())
    kind = "momenta/"
    momenta = {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
    if momenta.keys() != named:
        return weights, None
    errors = [(entry["error_top1"], entry["loss"]) for entry in state.val_record]
    rate = learning_rate(config, state.epoch + 1, [error for error, _ in errors])
    rate = rate or state.learning_rate  # a policy that falls to zero is at its end
    return weights, theano_folder.Progress(layers_in(momenta), rate, errors)


def _chain_of(model: nn.Module, name: str) -> dict[str, int]:
    """All layers of the network, one after the other, with their numbers of groups.

    Raises UserError unless each takes what the one before gives, convolutions first, all with biases.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    named = {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}
    other = named ^ model.state_dict().keys()
    if other:
        raise UserError(
            f"theano_alexnet has convolutions and fully connected layers with biases: {min(other)}"
        )
    n_maps, kinds = 3, [type(layer) for layer in layers.values()]
    for layer in layers.values():
        if isinstance(layer, nn.Conv2d):
            fits, n_maps = layer.in_channels == n_maps and layer.groups in (1, 2), layer.out_channels
        else:
            fits, n_maps = layer.in_features % n_maps == 0, layer.out_features
        if not fits or kinds != sorted(kinds, key=lambda kind: kind is nn.Linear):
            raise UserError(
                f"theano_alexnet has one layer after the other, in 1 or 2 groups; {name} is not so"
            )
    return {name: getattr(layer, "groups", 1) for name, layer in layers.items()}


def describe(trained: Trained) -> tuple[dict[str, Any], list[str]]:
    """What one must know to use the weights, and notes on what could not be found out."""
    config, input_spec = trained.config, input_spec_of(trained.model, trained.config)
    facts: dict[str, Any] = {
        "model": config.model,
        "model_args": config.model_args,
        "n_classes": trained.n_classes,
        "epoch": trained.checkpoint.state.epoch,
        "input_size": input_spec.size,
        "input_order": "RGB",
        "input_scale": list(input_spec.scale),
    }
    mean: Sequence[float] | None = input_spec.mean
    dataset, notes = _dataset_of(config)
    if dataset and dataset.manifest:
        facts["classes"] = list(dataset.manifest.class_names or dataset.manifest.classes)
    if mean is None and dataset:
        mean = dataset.mean.mean((0, 1), np.float64).round(4).tolist()
    if mean is not None:
        facts["input_mean"] = list(mean)
    return facts, notes


def _dataset_of(config: Config) -> tuple[Dataset | None, list[str]]:
    try:
        return open_dataset(config), []
    except UserError as error:
        return None, [f"note: without class names and mean, as the dataset can't be opened: {error}"]


if __name__ == "__main__":
    sys.exit(main())
