"""Reading of state dicts from .safetensors and .pth files, without running code that a file may hold."""

import pickle
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.runs import checkpoint

_PICKLED = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_CODE = re.compile(r"GLOBAL (\S+)")  # in torch's error: the name that the file would have imported
# The first bytes of torch.save's files: of a zip, and of the format before 2020.
_BEGINNINGS = b"PK", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_WRAPPERS = ("state_dict", "model")  # keys under which training scripts save the weights


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by their names, on the CPU.

    Raises:
        UserError: The file is missing or damaged, holds something else, or would run code.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file (pretrained)")
    if path.suffix == ".safetensors":
        return checkpoint.load(path)
    if path.suffix not in _PICKLED:
        raise UserError(f"{path}: weights are read from .safetensors and .pth files, not '{path.suffix}'")
    return _tensors_of(path, _unpickle(path))


def _unpickle(path: Path) -> Any:
    """Load a .pth file with `weights_only`, which refuses everything but tensors and plain values."""
    try:
        _check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a file of another format
        text = " ".join(str(error).split())
        code = _CODE.search(text) if isinstance(error, pickle.UnpicklingError) else None
        if not code and not _is_by_torch(path):
            raise UserError(
                f"{path}: is not a whole file of weights: torch.save has not written it; perhaps pickle.dump "
                "has. If you trust it, load it in your own program and save its state dict with torch.save"
            ) from error
        if not code:
            raise UserError(f"{path}: is not a whole file of weights: {text}") from error
        raise UserError(
            f"{path}: refused: it needs unpickling of code ({code[1]}), which could do anything to this "
            "machine; if you trust it, load it in a program of your own and save its state_dict() alone"
        ) from error


def _check_stored(path: Path) -> None:
    """Raise ValueError for a compressed zip, which may expand to any size. torch.save does not compress."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            if any(member.compress_type != zipfile.ZIP_STORED for member in packed.infolist()):
                raise ValueError("it is a compressed zip, which torch.save does not make")


def _is_by_torch(path: Path) -> bool:
    """Return whether a file begins as torch.save's, or may be one of its tars from before 2017."""
    try:
        with open(path, "rb") as file:
            return file.read(16).startswith(_BEGINNINGS) or tarfile.is_tarfile(path)
    except OSError:  # torch's error says so
        return True


def _tensors_of(path: Path, loaded: Any) -> dict[str, torch.Tensor]:
    """Return the state dict in a loaded file, without wrappers and DataParallel's prefix 'module.'."""
    while isinstance(loaded, dict):
        inner = [loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), dict)]
        if not inner:
            break
        loaded = inner[0]
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(f"{path}: holds no state dict (names and tensors), but {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or not _is_plain(value):
            raise UserError(f"{path}: holds no state dict: {name!r} is no plain tensor")
    if all(name.startswith("module.") for name in loaded):
        return {name.removeprefix("module."): value for name, value in loaded.items()}
    return loaded


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.is_cpu and not tensor.is_quantized
