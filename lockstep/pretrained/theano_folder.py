"""theano_alexnet's folders of weights, read and written.

    W_<layer>_<epoch>.npy  b_<layer>_<epoch>.npy        weights and biases of a layer, numbered from 0
    W0_ W1_ b0_ b1_                                     of a convolution in two groups, one file a group
    mom_<number>_<epoch>.npy                            momenta: of W, b, or of W0, b0, W1, b1, layer by layer
    lr_<epoch>.npy                                      the learning rate after that epoch
    val_record.npy                                      (epoch, 2): top-1 error and loss, of all epochs
    config.yaml                                         optional; its lib_conv is used

Weights are float32: of a convolution (input, row, column, output), of a fully connected layer (input,
output). What differs besides the layout:

- With `lib_conv: cudnn` Theano convolves, so filters are those of PyTorch's correlation turned by 180
  degrees. cuda-convnet correlates.
- Dropout: theano_alexnet halves what comes out of it in validation, PyTorch doubles it in training. So
  weights that lie behind a dropout (those of all fully connected layers but the first) are halved here.
- Momenta: v' = m v' - r g there, with the rate r (2 r for biases) in it; v = m v + g here. So v = -v' / r.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lockstep.config import read_yaml
from lockstep.data.dataset import read_array
from lockstep.errors import UserError

LibConv = Literal["cudnn", "cudaconvnet"]
_WEIGHTS = re.compile(r"(W|b|W0|b0|W1|b1)_(\d+)_(\d+)\.npy")
_WHOLE, _HALVES = ("W", "b"), ("W0", "b0", "W1", "b1")  # in the order of their momenta
_BIAS_RATE = 2.0  # times the learning rate
_KEEP = 0.5  # theano_alexnet's dropout; a power of two, so nothing is rounded


@dataclass(frozen=True)
class Layer:
    """As in PyTorch: weight (output, input / groups, row, column) or (output, input), bias (output,)."""

    weight: np.ndarray
    bias: np.ndarray
    n_groups: int = 1


@dataclass(frozen=True)
class Progress:
    """How far the training had come. learning_rate: that of the next epoch. Errors are shares."""

    momenta: list[Layer]
    learning_rate: float
    errors: list[tuple[float, float]]  # an epoch's (top-1 error, loss)


def is_folder(path: Path) -> bool:
    """Whether there are weights of theano_alexnet in a folder."""
    return any(_WEIGHTS.fullmatch(file.name) for file in path.glob("*.npy"))


def newest_epoch(folder: Path) -> int:
    """The last epoch that has weights in the folder."""
    return max(int(match[3]) for file in folder.glob("*.npy") if (match := _WEIGHTS.fullmatch(file.name)))


def lib_conv_of(folder: Path) -> LibConv:
    """The library that the folder's config.yaml names. Raises UserError where there is none."""
    path = folder / "config.yaml"
    found = read_yaml(path).values.get("lib_conv") if path.exists() else None
    if found == "cudnn" or found == "cudaconvnet":
        return found  # type: ignore[no-any-return]
    raise UserError(
        f"{folder}: has no config.yaml that says with which lib_conv it was trained: set "
        "pretrained_lib_conv: cudnn (theano_alexnet's default) or cudaconvnet"
    )


def read_arrays(folder: Path, epoch: int) -> list[list[np.ndarray]]:
    """Weights and biases of all layers as they are in the files: [[W, b], [W0, b0, W1, b1], ...].

    Raises UserError naming a file that is missing or is not what its name says.
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


def read_progress(folder: Path, epoch: int, lib_conv: LibConv, weights: list[list[np.ndarray]]) -> Progress:
    """Momenta (of `weights`, as `read_arrays` gives them), learning rate, validation record.

    Raises UserError as `read_arrays` does.
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
    return Progress(momenta, float(rate), [(float(error), float(loss)) for error, loss in record[:epoch]])


def join(arrays: list[list[np.ndarray]], lib_conv: LibConv) -> list[Layer]:
    """From theano_alexnet's arrays to PyTorch's: axes in order, filters turned, halves put together."""
    layers, n_connected = [], 0
    for layer in arrays:
        n_connected += layer[0].ndim == 2
        scale = _KEEP if n_connected > 1 else 1
        weight = np.concatenate([_to_torch(array, lib_conv) for array in layer[::2]])
        layers.append(Layer(weight * scale, np.concatenate(layer[1::2]), len(layer) // 2))
    return layers


def split(layers: list[Layer], lib_conv: LibConv) -> list[list[np.ndarray]]:
    """The opposite of `join`: float32, in C order."""
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
    folder: Path, epoch: int, lib_conv: LibConv, weights: list[Layer], progress: Progress | None
) -> None:
    """Writes the files into an existing folder, with those for resuming where there is progress."""
    for number, arrays in enumerate(split(weights, lib_conv)):
        for name, array in zip(_HALVES if len(arrays) == 4 else _WHOLE, arrays, strict=True):
            np.save(folder / f"{name}_{number}_{epoch}.npy", array)
    (folder / "config.yaml").write_text(f"lib_conv: {lib_conv}\nload_epoch: {epoch}\n", encoding="utf-8")
    if progress is None:
        return
    rate = np.float32(progress.learning_rate)
    scaled = [_scale(layer, -float(rate), -_BIAS_RATE * float(rate)) for layer in progress.momenta]
    momenta = split(scaled, lib_conv)
    for number, array in enumerate(array for layer in momenta for array in layer):
        np.save(folder / f"mom_{number}_{epoch}.npy", array)
    np.save(folder / f"lr_{epoch}.npy", rate)
    np.save(folder / "val_record.npy", np.array(progress.errors, np.float64).reshape(-1, 2))


def _names_of(folder: Path, epoch: int) -> list[list[str]]:
    """Each layer's files without '_<epoch>.npy', in the order of their momenta: [['W_0', 'b_0'], ...]."""
    matches = [match for file in folder.glob("*.npy") if (match := _WEIGHTS.fullmatch(file.name))]
    there: dict[int, set[str]] = {}
    for match in matches:
        if int(match[3]) == epoch:
            there.setdefault(int(match[2]), set()).add(match[1])
    if not there:
        raise UserError(
            f"{folder}: has no weights of epoch {epoch}; the newest are of {newest_epoch(folder)}"
        )
    layers = []
    for number in range(max(there) + 1):
        found = there.get(number, set())
        expected = _HALVES if found & set(_HALVES) else _WHOLE
        for name in set(expected) ^ found:
            said = "is missing" if name in expected else "does not belong to a layer in two groups"
            raise UserError(f"{folder}: {name}_{number}_{epoch}.npy {said}")
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
    """float32; of float64, which Theano can be told to use, the nearest."""
    array = read_array(path)
    if array.dtype not in (np.float32, np.float64):
        raise UserError(f"{path}: holds {array.dtype}, not float32")
    return array.astype(np.float32, copy=False)


def _to_torch(weight: np.ndarray, lib_conv: LibConv) -> np.ndarray:
    """(input, row, column, output) to (output, input, row, column); (input, output) to (output, input)."""
    if weight.ndim == 2:
        return weight.T
    weight = weight.transpose(3, 0, 1, 2)
    return weight[:, :, ::-1, ::-1] if lib_conv == "cudnn" else weight


def _from_torch(weight: np.ndarray, lib_conv: LibConv) -> np.ndarray:
    if weight.ndim == 2:
        return weight.T
    weight = weight[:, :, ::-1, ::-1] if lib_conv == "cudnn" else weight
    return weight.transpose(1, 2, 3, 0)


def _scale(momenta: Layer, rate: float, bias_rate: float) -> Layer:
    """Momenta times these, rounded once."""
    weight = np.multiply(momenta.weight, rate, dtype=np.float64).astype(momenta.weight.dtype)
    bias = np.multiply(momenta.bias, bias_rate, dtype=np.float64).astype(momenta.bias.dtype)
    return Layer(weight, bias, momenta.n_groups)
