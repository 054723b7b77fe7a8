"""AlexNet's layers one by one, forward and backward in bf16: our kernels beside torch's, groups beside none.
Forward only: cuDNN's convolution with ReLU, which has no backward pass, and the kernel that crops images.

Each is timed separately on the device; what a step takes is more than the sum where launches or caches cost.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import device_turns, matrix_product
from lockstep.backends.cuda import CudaBackend
from lockstep.config import Config, Layer, resolve
from lockstep.config.augmentation import device_changes
from lockstep.data.preparing import Preparer
from lockstep.kernels.augment import CropMirrorSubtractKernel
from lockstep.kernels.sgd import SgdKernel
from lockstep.loading.slots import BlockLayout, RingShape
from lockstep.network import convolution, dropout
from lockstep.network.layers import INSTALLED, LocalResponseNorm, ReluMaxPool, install_kernels
from lockstep.network.low_precision import Update

# channels, rows and columns of the input; outputs, kernel, stride, padding, groups
_CONVOLUTIONS = {
    "conv1": (3, 227, (96, 11, 4, 0, 1)),
    "conv1 by space-to-depth 4": (48, 57, (96, 3, 1, 0, 1)),
    "conv2": (96, 27, (256, 5, 1, 2, 2)),
    "conv3": (256, 13, (384, 3, 1, 1, 1)),
    "conv4": (384, 13, (384, 3, 1, 1, 2)),
    "conv5": (384, 13, (256, 3, 1, 1, 2)),
}
_NORMALISED = {"LRN 96 x 27 x 27": (96, 27), "LRN 256 x 13 x 13": (256, 13)}
_POOLED = {"pool1": (96, 55), "pool2": (256, 27), "pool5": (256, 13)}
_CHANGES: dict[str, dict[str, Any]] = {
    "resized crops": {"crop": "random_resized"},
    "resized crops, jittered": {"crop": "random_resized", "color_jitter": 0.4},
    "resized crops, erased and mixed": {"crop": "random_resized", "random_erasing": 0.25, "mixup": 0.2},
}
_PRODUCTS = 6  # of 8192 x 8192 matrices: about 8 ms, in which the host launches the calls of a layer


def run(setting: Setting, work: Path, record: Record) -> None:
    backend = CudaBackend("cuda:0")
    backend.start_computing(Config())
    torch.backends.cudnn.benchmark = True
    found: dict[str, dict[str, float]] = {}
    multiply = matrix_product(setting, "cpu" if setting.rehearsal else backend.memory.device)

    def occupy() -> None:
        for _ in range(_PRODUCTS):
            multiply()

    for name, make in _layers(setting, backend).items():
        with record.attempt(name):
            step = make()
            for _ in range(3):
                step()
            driver, stream = backend.memory.driver, backend.stream
            seconds = device_turns(
                {name: step}, driver, stream, setting.layer_calls, setting.n_rounds, occupy
            )[name]
            found[name] = {"ms": seconds * 1e3}
            record.keep("layers", found)


def _layers(setting: Setting, backend: CudaBackend) -> dict[str, Callable[[], Callable[[], object]]]:
    """What makes each step; not before its turn, so that memory and algorithms are those of its own."""
    place = "cpu" if setting.rehearsal else backend.memory.device
    layers: dict[str, Callable[[], Callable[[], object]]] = {}
    for name, (channels, size, form) in _CONVOLUTIONS.items():
        groups = {f"{name}, {form[-1]} groups": form[-1], f"{name}, dense": 1}
        for text, n_groups in groups.items() if form[-1] > 1 else ((name, 1),):
            shape, new_form = _shape(setting, channels, size), (*form[:-1], n_groups)
            layers[text] = partial(_convolution, shape, new_form, place, not name.startswith("conv1"))
    pictures, conv1 = _shape(setting, 3, 227), (96, 11, 4, 0, 1)
    for text, in_blocks in (("torch makes the blocks", False), ("in blocks already", True)):
        name = f"conv1, conv_layout: space_to_depth, {text}"
        layers[name] = partial(_convolution_in, "space_to_depth", pictures, conv1, place, in_blocks)
    for text, in_blocks in (("images", False), ("blocks for conv1", True)):
        layers[f"augment, forward: {text}"] = partial(_augment, setting, in_blocks, backend)
    for text, keys in _CHANGES.items():
        layers[f"augment, forward: {text}"] = partial(_augment, setting, False, backend, keys)
    for name in ("conv3", "conv4") if not setting.rehearsal else ():  # behind the others pooling comes first
        channels, size, form = _CONVOLUTIONS[name]
        for text, way in {
            "conv2d, relu": _relu_behind,
            "cudnn_convolution_relu": torch.cudnn_convolution_relu,
        }.items():
            layers[f"{name} and ReLU, forward: {text}"] = partial(
                _forward, way, _shape(setting, channels, size), form, place
            )
    for name, (channels, size) in _NORMALISED.items():
        shape = _shape(setting, channels, size)
        layers[f"{name}: our kernel"] = partial(_with_kernels, LocalResponseNorm(), shape, place, backend)
        layers[f"{name}: torch, closed form"] = partial(_module, LocalResponseNorm(), shape, place)
        layers[f"{name}: nn.LocalResponseNorm"] = partial(
            _module, nn.LocalResponseNorm(5, 5e-4, 0.75, 2.0), shape, place
        )
    shape = (setting.batch_size, 64 if setting.rehearsal else 4096)
    layers["dropout: our kernel"] = partial(_dropout, "all", shape, place, backend)
    layers["dropout by sample: torch"] = partial(_dropout, "none", shape, place, backend)
    layers["dropout: nn.Dropout"] = partial(_module, nn.Dropout(), shape, place)
    for name, (channels, size) in _POOLED.items():
        shape = _shape(setting, channels, size)
        layers[f"ReLU and {name}: our kernel"] = partial(
            _with_kernels, ReluMaxPool(3, 2), shape, place, backend
        )
        layers[f"ReLU and {name}: torch"] = partial(_module, ReluMaxPool(3, 2), shape, place)
    n_elements = 1000 if setting.rehearsal else 60_965_224
    layers["fused SGD, 61 M parameters"] = partial(_sgd, n_elements, place)
    layers["SGD, bfloat16 gradients and copies: our kernel"] = partial(_update, n_elements, place, backend)
    return layers


def _shape(setting: Setting, channels: int, size: int) -> tuple[int, ...]:
    size = min(size, 13) if setting.rehearsal else size
    return setting.batch_size, channels, size, size


def _module(module: nn.Module, shape: tuple[int, ...], place: str) -> Callable[[], object]:
    """Its forward and backward pass, with the input's gradient."""
    x = _random(shape, place).requires_grad_()
    gradient = _random(tuple(module(x).shape), place)

    def step() -> None:
        torch.autograd.grad(module(x), x, gradient)

    return step


def _with_kernels(module: nn.Module, shape: tuple[int, ...], place: str, backend: CudaBackend) -> Any:
    implementations = install_kernels(nn.Sequential(module), Config(), backend.memory, backend.stream)
    if INSTALLED not in implementations.values():
        raise RuntimeError(str(implementations))
    return _module(module, shape, place)


def _dropout(which: str, shape: tuple[int, ...], place: str, backend: CudaBackend) -> Callable[[], object]:
    model = nn.Sequential(nn.Dropout())
    layers = dropout.install(model)
    install_kernels(
        model, resolve([Layer("benchmark", {"custom_kernels": which})])[0], backend.memory, backend.stream
    )
    dropout.set_keys(layers, torch.arange(shape[0], dtype=torch.int32, device=place))
    return _module(model, shape, place)


def _convolution(
    shape: tuple[int, ...], form: tuple[int, ...], place: str, with_input: bool
) -> Callable[[], object]:
    """with_input: its gradient is needed too."""
    outputs, kernel, stride, padding, groups = form
    x = _random(shape, place).requires_grad_(with_input)
    weight = _random((outputs, shape[1] // groups, kernel, kernel), place).requires_grad_()
    wanted = [weight, x] if with_input else [weight]
    gradient = _random(tuple(F.conv2d(x, weight, None, stride, padding, 1, groups).shape), place)

    def step() -> None:
        torch.autograd.grad(F.conv2d(x, weight, None, stride, padding, 1, groups), wanted, gradient)

    return step


def _convolution_in(
    form: str, shape: tuple[int, ...], sizes: tuple[int, ...], place: str, in_blocks: bool
) -> Callable[[], object]:
    """Forward, and backward for the weights, by a layer in another form. in_blocks: images come so."""
    outputs, kernel, stride, padding, groups = sizes
    x = _random(shape, place)
    layer = nn.Conv2d(shape[1], outputs, kernel, stride, padding, 1, groups, bias=False)
    layer = layer.to(place, x.dtype)
    convolution.install(layer, resolve([Layer("benchmark", {"conv_layout": form})])[0])
    gradient = _random(tuple(layer(x).shape), place)
    if in_blocks:
        assert isinstance(layer, convolution.Convolution)
        x = layer.stack(x).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        torch.autograd.grad(layer(x), layer.weight, gradient)

    return step


def _augment(
    setting: Setting, in_blocks: bool, backend: CudaBackend, keys: dict[str, Any] | None = None
) -> Callable[[], object]:
    """The kernels from raw images to those of the network, in bfloat16; plain crops are the corner."""
    memory, batch_size = backend.memory, setting.batch_size
    whole, crop = (32, 27) if setting.rehearsal else (256, 227)
    blocks = BlockLayout(4, 0, (crop - 11) // 4 + 3) if in_blocks else None
    side = blocks.count if blocks else crop
    config = resolve([Layer("benchmark", keys or {})])[0]
    changes = device_changes(config)
    raw = RingShape(1, batch_size, (whole, whole), "uint8", (crop, crop), changes=changes)
    out = RingShape(1, batch_size, (side, side), "bfloat16", (crop, crop), blocks=blocks)
    kernel = CropMirrorSubtractKernel(
        memory, backend.stream, np.zeros((whole, whole, 3), np.float32), raw, out
    )
    given, made = (memory.allocate(shape.n_bytes, "images") for shape in (raw, out))
    memory.upload(given, _with_draws(raw, config))

    def step() -> None:  # with a hold on both blocks, whose memory would go with them
        kernel.launch(given.pointer, made.pointer, batch_size)

    return step


def _with_draws(raw: RingShape, config: Config) -> np.ndarray:
    """Return a raw slot of black images with a configuration's draws, uint8 (n_bytes,)."""
    memory = np.zeros(raw.n_bytes, np.uint8)
    slot, samples = raw.slots(memory)[0], np.arange(raw.batch_size)
    if raw.changes and slot.changes is not None:
        preparer = Preparer(config, raw.image_size, raw.crop_size, np.zeros(raw.n_colors), raw.changes)
        preparer.draw(True, 1, len(samples))
        no_crops = np.zeros((len(samples), 3), np.int32)
        preparer.describe(samples, samples, no_crops, slot.changes[: len(samples)])
    if slot.pairs is not None:
        slot.pairs["own"], slot.pairs["partner"], slot.pairs["weight"] = samples, samples[::-1], 128
    return memory


def _forward(
    way: Callable[..., object], shape: tuple[int, ...], form: tuple[int, ...], place: str
) -> Callable[[], object]:
    """A convolution with ReLU, without a gradient."""
    outputs, kernel, stride, padding, groups = form
    x, weight = _random(shape, place), _random((outputs, shape[1] // groups, kernel, kernel), place)
    bias = torch.zeros(outputs, dtype=x.dtype, device=place)
    return partial(way, x, weight, bias, (stride,) * 2, (padding,) * 2, (1, 1), groups)


def _relu_behind(*arguments: Any) -> torch.Tensor:
    return F.conv2d(*arguments).relu_()


def _update(n_elements: int, place: str, backend: CudaBackend) -> Callable[[], object]:
    weight, low = torch.zeros(n_elements, device=place), torch.bfloat16
    update = Update(weight, weight.to(low), torch.ones(n_elements, dtype=low, device=place))
    update.momenta, update.rate, update.decay = torch.zeros_like(weight), 0.01, 0.0005
    return partial(SgdKernel(backend.memory, backend.stream).step, [update], 0.9, False)


def _sgd(n_elements: int, place: str) -> Callable[[], object]:
    parameter = torch.zeros(n_elements, device=place, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter], lr=0.01, momentum=0.9, weight_decay=0.0005, fused=True).step


def _random(shape: tuple[int, ...], place: str) -> torch.Tensor:
    dtype = (
        torch.float32 if place == "cpu" else torch.bfloat16
    )  # torch's normalisation has no bfloat16 on CPUs
    values = torch.randn(shape, device=place).to(dtype)
    return values.to(memory_format=torch.channels_last) if len(shape) == 4 else values
