"""Writes and reads a checkpoint's tensors. Its place and its record are in runfolder.py."""

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep.errors import UserError
from lockstep.files import checksum, publish
from lockstep.runs.folder import State, record


def save(folder: Path, tensors: dict[str, torch.Tensor], state: State) -> Path:
    """Writes one checkpoint, whole or not at all, and makes it the latest. Returns the path of its tensors.

    Raises UserError when the disk is full or can't be written; older checkpoints stay as they are.
    """
    path = folder / "checkpoints" / f"{state.name}.safetensors"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        state = dataclasses.replace(state, sha256=checksum(temporary))
        publish(temporary, path)
        record(path, state)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # the news is the first error
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: the checkpoint can't be written: {error}") from error
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a checkpoint. Raises UserError naming the file when it is not whole."""
    try:
        with open(path, "rb"):  # safetensors says 'no such file' for whatever keeps it from opening one
            pass
        return load_file(os.fspath(path))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}") from error
    except (RuntimeError, SafetensorError) as error:  # RuntimeError: torch's, which opens it once more
        raise UserError(f"{path}: is not a whole safetensors file: {error}") from error
