"""Writes and reads a checkpoint's tensors. Its place and its record are in runfolder.py."""

import dataclasses
import hashlib
import json
import os
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.errors import UserError
from lockstep.files import cause_of, publish
from lockstep.runs.folder import State, record

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # safetensors' names, in the order in which a file has them: aligned, as larger elements come first


def save(folder: Path, tensors: dict[str, torch.Tensor], state: State) -> Path:
    """Writes one checkpoint, whole or not at all, and makes it the latest. Returns the path of its tensors.

    Raises UserError when the disk is full or can't be written; older checkpoints stay as they are.
    """
    path = folder / "checkpoints" / f"{state.name}.safetensors"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        sha256 = write(temporary, tensors)
        publish(temporary, path)
        record(path, dataclasses.replace(state, sha256=sha256))
    except OSError as error:
        with suppress(OSError):  # the news is the first error
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: the checkpoint can't be written: {cause_of(error)}") from error
    return path


def write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """A safetensors file, byte for byte as that package writes it. Returns its SHA-256. Raises OSError.

    The package is not used for it since it has a second temporary file with a rename of its own, of which
    nothing can be said when the disk fails, and since the checksum would need the file to be read again.
    """
    places = list(_DTYPES)
    in_order = sorted(tensors.items(), key=lambda item: (places.index(item[1].dtype), item[0]))
    header, end = {}, 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.nbytes
        kind = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        contents = (_content(tensor) for _, tensor in in_order)
        for part in chain[bytes | memoryview]((len(text).to_bytes(8, "little"), text), contents):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous one in host memory without a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
