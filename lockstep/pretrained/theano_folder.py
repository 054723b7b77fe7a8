"""Reading and writing of theano_alexnet's folders of weights.

    W_<layer>_<epoch>.npy  b_<layer>_<epoch>.npy        weights and biases of a layer, numbered from 0
    W0_ W1_ b0_ b1_                                     of a convolution in two groups, one file a group
    mom_<number>_<epoch>.npy                            momenta: of W, b, or of W0, b0, W1, b1, layer by layer
    lr_<epoch>.npy                                      the learning rate after that epoch
    val_record.npy                                      (epoch, 2): top-1 error and loss, of all epochs
    config.yaml                                         optional; its lib_conv is used

Weights are float32: (input, row, column, output) for a convolution, (input, output) for a linear layer. There
are three further differences:

- Filters: with `lib_conv: cudnn` Theano convolves and PyTorch correlates, so filters are rotated by 180
  degrees. cuda-convnet correlates.
- Dropout: theano_alexnet halves activations in validation, PyTorch doubles them in training. So this module
  halves the weights behind a dropout, which are those of all linear layers but the first.
- Momenta: theano_alexnet has v' = m v' - r g with the rate r (2 r for biases); PyTorch has v = m v + g. So
  v = -v' / r.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lockstep.config import read_yaml
from lockstep.errors import UserError
from lockstep.files import as_npy, read_array

LibConv = Literal["cudnn", "cudaconvnet"]
_WEIGHTS = re.compile(r"(W|b|W0|b0|W1|b1)_(\d+)_(\d+)\.npy")
_WHOLE, _HALVES = ("W", "b"), ("W0", "b0", "W1", "b1")  # in the order of their momenta
_BIAS_RATE = 2.0  # times the learning rate
_KEEP = 0.5  # theano_alexnet's keep probability; a power of two, so scaling does not round


@dataclass(frozen=True)
class LayerArrays:
    """A PyTorch layer: weight (output, input / groups, row, column) or (output, input); bias (output,)."""

    weight: np.ndarray
    bias: np.ndarray
    n_groups: int = 1


@dataclass(frozen=True)
class TrainingState:
    """The training state beside the weights. `learning_rate` is that of the next epoch; errors are shares."""

    momenta: list[LayerArrays]
    learning_rate: float
    errors: list[tuple[float, float]]  # (top-1 error, loss) of each epoch


def is_folder(path: Path) -> bool:
    """Return whether a folder holds weights of theano_alexnet."""
    return any(_WEIGHTS.fullmatch(file.name) for file in path.glob("*.npy"))


def newest_epoch(folder: Path) -> int:
    """Return the last epoch with weights in the folder."""
    return max(int(match[3]) for file in folder.glob("*.npy") if (match := _WEIGHTS.fullmatch(file.name)))


def lib_conv_of(folder: Path) -> LibConv:
    """Return the `lib_conv` of the folder's config.yaml. Raise UserError if it is missing."""
    path = folder / "config.yaml"
    found = read_yaml(path).values.get("lib_conv") if path.exists() else None
    if found == "cudnn" or found == "cudaconvnet":
        return found  # type: ignore[no-any-return]
    raise UserError(
        f"{folder}: has no config.yaml that says with which lib_conv it was trained: set "
        "pretrained_lib_conv: cudnn (theano_alexnet's default) or cudaconvnet"
    )


def read_arrays(folder: Path, epoch: int) -> list[list[np.ndarray]]:
    """Return the weights and biases of all layers as stored: [[W, b], [W0, b0, W1, b1], ...].

    Raises:
        UserError: A file is missing or holds something else; the message names it.
    """
    layers = []
    for names in _names_of(folder, epoch):
        arrays = [_read(folder / f"{name}_{epoch}.npy") for name in names]
        for name, array, first in zip(names, arrays, arrays[:2] * 2, strict=False):
            if array.shape != first.shape:
                raise UserError(
                    f"{folder}: {name}_{epoch}.npy is {array.shape}, its other half {first.shape}"
                )
        layers.append(arrays)
    return layers


def read_progress(
    folder: Path, epoch: int, lib_conv: LibConv, weights: list[list[np.ndarray]]
) -> TrainingState:
    """Read the momenta, the learning rate and the validation record of an epoch.

    Args:
        folder: theano_alexnet's folder.
        epoch: The epoch to read.
        lib_conv: The library that trained the filters.
        weights: The result of `read_arrays`, whose shapes the momenta must have.

    Raises:
        UserError: A file is missing or holds something else; the message names it.
    """
    rate = read_array(folder / f"lr_{epoch}.npy")
    if rate.shape != () or rate.dtype.kind != "f" or not 0 < rate < np.inf:
        raise UserError(f"{folder / f'lr_{epoch}.npy'}: is not a learning rate")
    path = folder / "val_record.npy"
    record = read_array(path)
    if record.ndim != 2 or record.shape[1] != 2 or record.dtype.kind != "f":
        raise UserError(f"{path}: holds {record.dtype} of shape {record.shape}, not (epochs, 2) numbers")
    if len(record) < epoch or not np.isfinite(record[:epoch]).all():
        raise UserError(f"{path}: does not hold all of {epoch} epochs")
    momenta = join(_read_momenta(folder, epoch, weights), lib_conv)
    momenta = [_scale(layer, -1 / float(rate), -1 / (_BIAS_RATE * float(rate))) for layer in momenta]
    return TrainingState(
        momenta, float(rate), [(float(error), float(loss)) for error, loss in record[:epoch]]
    )


def join(arrays: list[list[np.ndarray]], lib_conv: LibConv) -> list[LayerArrays]:
    """Convert theano_alexnet's arrays to PyTorch's: permute axes, rotate filters, join halves."""
    layers, n_connected = [], 0
    for layer in arrays:
        n_connected += layer[0].ndim == 2
        scale = _KEEP if n_connected > 1 else 1
        weight = np.concatenate([_to_torch(array, lib_conv) for array in layer[::2]])
        layers.append(LayerArrays(weight * scale, np.concatenate(layer[1::2]), len(layer) // 2))
    return layers


def split(layers: list[LayerArrays], lib_conv: LibConv) -> list[list[np.ndarray]]:
    """Convert layers to theano_alexnet's arrays, float32 in C order: the inverse of `join`."""
    arrays, n_connected = [], 0
    for layer in layers:
        n_connected += layer.weight.ndim == 2
        scale = _KEEP if n_connected > 1 else 1
        weights = np.split(layer.weight / scale, layer.n_groups)
        biases = np.split(layer.bias, layer.n_groups)
        halves = [(_from_torch(w, lib_conv), b) for w, b in zip(weights, biases, strict=True)]
        arrays.append([np.ascontiguousarray(array, np.float32) for half in halves for array in half])
    return arrays


def write(
    folder: Path, epoch: int, lib_conv: LibConv, weights: list[LayerArrays], progress: TrainingState | None
) -> None:
    """Write theano_alexnet's files into an existing folder.

    Args:
        folder: The folder.
        epoch: In the names of the files.
        lib_conv: The library whose layout the weights get.
        weights: Of all layers.
        progress: Also write the momenta and the record for resuming; None: the weights only.

    Raises:
        OSError: A file can't be written.
    """
    for number, arrays in enumerate(split(weights, lib_conv)):
        for name, array in zip(_HALVES if len(arrays) == 4 else _WHOLE, arrays, strict=True):
            (folder / f"{name}_{number}_{epoch}.npy").write_bytes(as_npy(array))
    (folder / "config.yaml").write_text(f"lib_conv: {lib_conv}\nload_epoch: {epoch}\n", encoding="utf-8")
    if progress is None:
        return
    rate = np.float32(progress.learning_rate)
    scaled = [_scale(layer, -float(rate), -_BIAS_RATE * float(rate)) for layer in progress.momenta]
    momenta = split(scaled, lib_conv)
    for number, array in enumerate(array for layer in momenta for array in layer):
        (folder / f"mom_{number}_{epoch}.npy").write_bytes(as_npy(array))
    (folder / f"lr_{epoch}.npy").write_bytes(as_npy(rate))
    (folder / "val_record.npy").write_bytes(as_npy(np.array(progress.errors, np.float64).reshape(-1, 2)))


def _names_of(folder: Path, epoch: int) -> list[list[str]]:
    """Return each layer's file names without '_<epoch>.npy', in the order of their momenta."""
    matches = [match for file in folder.glob("*.npy") if (match := _WEIGHTS.fullmatch(file.name))]
    names_of_layer: dict[int, set[str]] = {}
    for match in matches:
        if int(match[3]) == epoch:
            names_of_layer.setdefault(int(match[2]), set()).add(match[1])
    if not names_of_layer:
        raise UserError(
            f"{folder}: has no weights of epoch {epoch}; the newest are of {newest_epoch(folder)}"
        )
    layers = []
    for number in range(max(names_of_layer) + 1):
        names = names_of_layer.get(number, set())
        expected = _HALVES if names & set(_HALVES) else _WHOLE
        for name in set(expected) ^ names:
            problem = "is missing" if name in expected else "does not belong to a layer in two groups"
            raise UserError(f"{folder}: {name}_{number}_{epoch}.npy {problem}")
        layers.append([f"{name}_{number}" for name in expected])
    return layers


def _read(path: Path) -> np.ndarray:
    array = _read_floats(path)
    dimensions = (2, 4) if path.name.startswith("W") else (1,)
    if array.ndim not in dimensions:
        kind = "weights (2 or 4 dimensions)" if path.name.startswith("W") else "biases (1 dimension)"
        raise UserError(f"{path}: its shape {array.shape} is not that of {kind}")
    return array


def _read_momenta(folder: Path, epoch: int, weights: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    momenta: list[list[np.ndarray]] = []
    for layer in weights:
        first = sum(len(arrays) for arrays in momenta)
        paths = [folder / f"mom_{first + place}_{epoch}.npy" for place in range(len(layer))]
        momenta.append([_read_floats(path) for path in paths])
        for path, array, like in zip(paths, momenta[-1], layer, strict=True):
            if array.shape != like.shape:
                raise UserError(f"{path}: its shape is {array.shape}, that of its weights {like.shape}")
            if not np.isfinite(array).all():
                raise UserError(f"{path}: holds momenta that are not finite")
    return momenta


def _read_floats(path: Path) -> np.ndarray:
    """Read a float array as float32. Theano can also write float64, which is rounded."""
    array = read_array(path)
    if array.dtype not in (np.float32, np.float64):
        raise UserError(f"{path}: holds {array.dtype}, not float32")
    return array.astype(np.float32, copy=False)


def _to_torch(weight: np.ndarray, lib_conv: LibConv) -> np.ndarray:
    """Convert (input, row, column, output) to (output, input, row, column); transpose (input, output)."""
    if weight.ndim == 2:
        return weight.T
    weight = weight.transpose(3, 0, 1, 2)
    return weight[:, :, ::-1, ::-1] if lib_conv == "cudnn" else weight


def _from_torch(weight: np.ndarray, lib_conv: LibConv) -> np.ndarray:
    if weight.ndim == 2:
        return weight.T
    weight = weight[:, :, ::-1, ::-1] if lib_conv == "cudnn" else weight
    return weight.transpose(1, 2, 3, 0)


def _scale(momenta: LayerArrays, rate: float, bias_rate: float) -> LayerArrays:
    """Return the momenta times the rates, rounded once."""
    weight = np.multiply(momenta.weight, rate, dtype=np.float64).astype(momenta.weight.dtype)
    bias = np.multiply(momenta.bias, bias_rate, dtype=np.float64).astype(momenta.bias.dtype)
    return LayerArrays(weight, bias, momenta.n_groups)
