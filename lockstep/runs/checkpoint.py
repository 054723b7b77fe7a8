"""Writing and reading a checkpoint's tensors. checkpoint_files.py finds it and verifies its checksum."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.errors import UserError
from lockstep.files import cause_of, name_in_utf8, publish, remove_useless
from lockstep.runs.checkpoint_files import record
from lockstep.runs.state import State

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
}  # safetensors' names, in a file's order: larger elements first, so all are aligned


def save(folder: Path, tensors: dict[str, torch.Tensor], state: State) -> Path:
    """Write one checkpoint, completely or not at all, and make it the latest.

    Args:
        folder: The run's folder.
        tensors: Contiguous tensors by name.
        state: The rest of the checkpoint, without the checksum.

    Returns:
        The path of the file of tensors.

    Raises:
        UserError: The disk is full or can't be written. Older checkpoints stay as they are.
    """
    path = folder / "checkpoints" / f"{state.name}.safetensors"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        sha256 = write(temporary, tensors)
        publish(temporary, path)
        record(path, dataclasses.replace(state, sha256=sha256))
    except OSError as error:
        remove_useless(temporary)
        raise UserError(f"{path}: the checkpoint can't be written: {cause_of(error)}") from error
    return path


def write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a safetensors file, byte for byte as that package writes it.

    The package itself is not used, for two reasons. It writes a temporary file and renames it, and reports
    nothing about that file when the disk fails; and the checksum would need the file to be read again.

    Returns:
        The file's SHA-256, in hexadecimal.

    Raises:
        OSError: The file can't be written.
    """
    with open(path, "wb") as file:
        return digest_of(tensors, file)


def digest_of(tensors: dict[str, torch.Tensor], file: BinaryIO | None = None) -> str:
    """Return the SHA-256 of the file that `write` writes, in hexadecimal, and write it into an open file."""
    digest = hashlib.sha256()
    for part in _serialized(tensors):
        digest.update(part)
        if file is not None:
            file.write(part)
    return digest.hexdigest()


def _serialized(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file."""
    dtypes = list(_DTYPES)
    in_order = sorted(tensors.items(), key=lambda item: (dtypes.index(item[1].dtype), item[0]))
    header, end = {}, 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in in_order:
        yield _content(tensor)


def _content(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; without a copy if it is contiguous and in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def load(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint. Raise UserError if the file is damaged."""
    try:
        with open(path, "rb"):  # safetensors reports any failure to open a file as 'no such file'
            pass
        with name_in_utf8(path) as name:
            return load_file(name)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}") from error
    except (RuntimeError, SafetensorError) as error:  # torch opens the file again and raises RuntimeError
        raise UserError(f"{path}: is not a whole safetensors file: {error}") from error
