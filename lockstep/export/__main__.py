"""Write a run's weights for other programs.

    python -m lockstep.export runs/try1 --to safetensors       a state dict, with class names and mean
    python -m lockstep.export runs/try1 --to torchvision       a .pth that load_state_dict takes
    python -m lockstep.export runs/try1 --to theano_alexnet    its folder of .npy files, to resume from there
    python -m lockstep.export runs/try1 --to onnx              needs the packages onnx and onnxscript
    python -m lockstep.export runs/try1 --to onnx --epoch best --out net.onnx

Existing files are not overwritten. docs/weights.md describes each format. Exit code: 0, or 2 if an argument
can't be used.
"""

import io
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from lockstep.config import Config, resolve
from lockstep.config.tasks import is_multilabel
from lockstep.data.dataset import open_dataset
from lockstep.data.description import Description
from lockstep.errors import UserError
from lockstep.extras import require
from lockstep.files import publish, refusing_unusable_paths
from lockstep.network.build import arguments_of, build_model, input_spec_of
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained import theano_folder
from lockstep.pretrained.heads import class_tensors, count_classes
from lockstep.pretrained.match import compare
from lockstep.pretrained.names import tensors_of
from lockstep.pretrained.weights import weights_of
from lockstep.programs import make_parser, reports_errors
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint_files import add_epoch, find_checkpoint
from lockstep.runs.dataset_description import read_description
from lockstep.runs.network_source import changed_source, check_importable
from lockstep.runs.state import Checkpoint
from lockstep.text import handle_closed_pipe

ENDINGS = {
    "safetensors": ".safetensors",
    "torchvision": ".pth",
    "theano_alexnet": "-theano_alexnet",
    "onnx": ".onnx",
}


@dataclass(frozen=True)
class Trained:
    """The network of a run's checkpoint on the CPU.

    Attributes:
        tensors: All tensors of the checkpoint by their names.
        notes: Lines for the user about checkpoints that were passed over.
    """

    checkpoint: Checkpoint
    config: Config
    model: nn.Module
    n_classes: int
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()


@reports_errors("lockstep")
def main() -> int:
    """Run the program and return its exit code."""
    parser = make_parser(__doc__, globals().get("COMMAND", "python -m lockstep.export"))
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--to", required=True, choices=ENDINGS, help="what to write: see above")
    add_epoch(parser)
    parser.add_argument(
        "--out", type=Path, help="the file or folder to make (in this folder, named after run and epoch)"
    )
    lib_conv = "for --to theano_alexnet: its key lib_conv, which says whether filters are flipped (cudnn)"
    parser.add_argument("--lib-conv", choices=("cudnn", "cudaconvnet"), help=lib_conv)
    arguments = parser.parse_args()
    if arguments.lib_conv and arguments.to != "theano_alexnet":
        raise UserError(f"--lib-conv {arguments.lib_conv} is for --to theano_alexnet, not for {arguments.to}")
    trained = load_trained(arguments.run, arguments.epoch)
    name = f"{arguments.run.resolve().name}-{trained.checkpoint.state.name}{ENDINGS[arguments.to]}"
    out = arguments.out or Path(name)
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)
    for line in export(trained, arguments.to, out, arguments.lib_conv or "cudnn"):
        print(line)
    what = f"model {trained.config.model}, {trained.n_classes} classes"
    print(f"wrote {out}: {what}, from {trained.checkpoint.path}")
    return 0


@refusing_unusable_paths()
def load_trained(run: Path, epoch: int | str) -> Trained:
    """Load the network of a run's checkpoint.

    Raises:
        UserError: A file is missing or damaged; the message names it.
    """
    chosen, notes = find_checkpoint(run, epoch)
    config, _ = resolve([chosen.settings])
    check_importable(run, config.model, chosen.state.name)
    notes += filter(None, [changed_source(run, config.model, chosen.state.name)])
    tensors = checkpoint.load(chosen.path)
    weights = weights_of(tensors)
    n_classes = count_classes(config, weights, str(chosen.path))
    model = build_model(config, n_classes)
    ours = tensors_of(model)
    match = compare(weights, ours)
    match.check(str(chosen.path), config.model, class_tensors(config) if any(match.problems.values()) else ())
    for name, tensor in ours.items():
        tensor.copy_(weights[name])
    return Trained(chosen, config, model.eval(), n_classes, tensors, tuple(notes))


@refusing_unusable_paths()
def export(trained: Trained, to: str, out: Path, lib_conv: theano_folder.LibConv = "cudnn") -> list[str]:
    """Write a network in another format. The write is atomic.

    Args:
        trained: The network.
        to: One of the formats of `--to`.
        out: The new file or folder.
        lib_conv: For theano_alexnet: the library that will use the filters.

    Returns:
        Lines for the user.

    Raises:
        UserError: `out` exists or can't be written, or the format can't hold this network.
    """
    if out.exists():
        raise UserError(f"{out}: already exists. Name another path with --out.")
    temporary = out.with_name(f".{out.name}.unfinished")
    try:
        if to == "theano_alexnet":
            layers, progress = theano_form(trained)
            shutil.rmtree(temporary, ignore_errors=True)  # left by an export that was killed
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
        with suppress(OSError):  # nothing was written if nothing can be removed
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)


def write_safetensors(trained: Trained, path: Path) -> list[str]:
    """Write the state dict, with the facts needed to use it as JSON in its metadata."""
    state = {name: value.contiguous().clone() for name, value in trained.model.state_dict().items()}
    facts, notes = describe(trained)
    save_file(state, path, {name: json.dumps(value) for name, value in facts.items()})
    return notes


def write_pth(trained: Trained, path: Path) -> list[str]:
    """Write the state dict with torch.save. torch.load reads it with weights_only."""
    content = io.BytesIO()  # torch.save does not report the cause if it can't write a file
    torch.save({name: value.contiguous() for name, value in trained.model.state_dict().items()}, content)
    path.write_bytes(content.getbuffer())
    return []


def write_onnx(trained: Trained, path: Path) -> list[str]:
    """Write the function from prepared images (batch, channels, rows, columns) to logits (batch, classes)."""
    require("--to onnx", "onnx", "onnx", "onnxscript")
    input_spec = input_spec_of(trained.model, trained.config)
    images = torch.zeros(2, len(input_spec.scale), *input_spec.size)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that are not needed
    with warnings.catch_warnings(action="ignore"):  # torch warns of its own deprecated functions
        torch.onnx.export(
            trained.model,
            (images,),
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


def theano_form(
    trained: Trained,
) -> tuple[list[theano_folder.LayerArrays], theano_folder.TrainingState | None]:
    """Return the layers for theano_alexnet, and the progress if the checkpoint has momenta.

    Raises:
        UserError: theano_alexnet can't have such a network, or the checkpoint is from within an epoch.
    """
    state, config, tensors = trained.checkpoint.state, trained.config, trained.tensors
    if len(state.val_record) != state.epoch:
        raise UserError(
            f"{trained.checkpoint.path}: was saved within an epoch, or in a run with val_freq: --epoch names "
            "a complete one; other formats need none"
        )
    if is_multilabel(config):
        raise UserError(
            f"{trained.checkpoint.path}: is of task: multilabel, and theano_alexnet has one class per image: "
            "choose another format"
        )
    groups = _chain_of(trained.model, config.model)
    named = {f"{name}.{kind}" for name in groups for kind in ("weight", "bias")}

    def layers_in(tensors: Mapping[str, torch.Tensor]) -> list[theano_folder.LayerArrays]:
        return [
            theano_folder.LayerArrays(
                tensors[f"{name}.weight"].numpy(), tensors[f"{name}.bias"].numpy(), n_groups
            )
            for name, n_groups in groups.items()
        ]

    weights = layers_in(trained.model.state_dict())
    kind = "momenta/"
    momenta = {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
    if momenta.keys() != named:
        return weights, None
    errors = [(entry["error_top1"], entry["loss"]) for entry in state.val_record]
    rate = learning_rate(config, state.epoch + 1, [error for error, _ in errors])
    rate = rate or state.learning_rate  # a schedule that falls to zero has ended
    return weights, theano_folder.TrainingState(layers_in(momenta), rate, errors)


def _chain_of(model: nn.Module, name: str) -> dict[str, int]:
    """Return the names of the network's layers in order, with their numbers of groups.

    Raises:
        UserError: The layers are not a chain of convolutions, then linear layers, all with biases.
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
    """Return the facts needed to use the weights, and notes on those that are unknown."""
    config, input_spec = trained.config, input_spec_of(trained.model, trained.config)
    rows, columns = input_spec.size
    facts: dict[str, Any] = {
        "model": config.model,
        "model_args": arguments_of(type(trained.model), config),
        "n_classes": trained.n_classes,
        "epoch": trained.checkpoint.state.epoch,
        "input_size": rows if rows == columns else [rows, columns],
        "input_order": {1: "grey", 3: "RGB", 4: "RGBA"}.get(len(input_spec.scale), "as in the dataset"),
        "input_scale": list(input_spec.scale),
    }
    mean: Sequence[float] | None = input_spec.mean
    dataset, notes = _description_of(trained)
    if dataset:
        facts["classes"] = list(dataset.class_names)
    if mean is None and dataset:
        mean = dataset.mean.mean((0, 1), np.float64).round(4).tolist()
    if mean is not None:
        facts["input_mean"] = list(mean)
    return facts, notes


def _description_of(trained: Trained) -> tuple[Description | None, list[str]]:
    """Return the description in the run's folder, or else that of the dataset, and notes."""
    try:
        path = trained.checkpoint.path
        saved = read_description(path.parent.parent, path.stem)
        return saved or open_dataset(trained.config).description, []
    except UserError as error:
        return None, [f"note: without class names and mean, as the dataset can't be opened: {error}"]


if __name__ == "__main__":
    handle_closed_pipe()
    sys.exit(main())
