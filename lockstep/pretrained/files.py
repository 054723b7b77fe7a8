"""Reads state dicts: .safetensors, and .pth without running any code that may be in it."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.runs import checkpoint

_PICKLED = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_CODE = re.compile(r"GLOBAL (\S+)")  # in torch's error: what the file would have imported and called
_WRAPPERS = ("state_dict", "model")  # where training scripts keep the weights beside other things


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names there, on the CPU.

    Raises UserError naming the file where it is not whole, holds something else, or would run code.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file (pretrained)")
    if path.suffix == ".safetensors":
        return checkpoint.load(path)
    if path.suffix not in _PICKLED:
        raise UserError(f"{path}: weights are read from .safetensors and .pth files, not '{path.suffix}'")
    return _tensors_of(path, _unpickle(path))


def _unpickle(path: Path) -> Any:
    """torch.load with weights_only: tensors and plain values; what names anything else is refused unrun."""
    try:
        _check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch meets in a file that is something else
        text = " ".join(str(error).split())
        code = _CODE.search(text) if isinstance(error, pickle.UnpicklingError) else None
        if not code:
            raise UserError(f"{path}: is not a whole file of weights: {text}") from error
        raise UserError(
            f"{path}: refused: it needs unpickling of code ({code[1]}), which could do anything to this "
            "machine; if you trust it, load it in a program of your own and save its state_dict() alone"
        ) from error


def _check_stored(path: Path) -> None:
    """Raises ValueError for a zip with compressed files in it, of which a few bytes may become any number.

    torch.save compresses nothing.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            if any(member.compress_type != zipfile.ZIP_STORED for member in packed.infolist()):
                raise ValueError("it is a compressed zip, which torch.save does not make")


def _tensors_of(path: Path, loaded: Any) -> dict[str, torch.Tensor]:
    """The state dict in what was loaded, which may be wrapped, with DataParallel's 'module.' before names."""
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
