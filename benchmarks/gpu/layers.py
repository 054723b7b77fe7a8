"""AlexNet's layers one by one, forward and backward in bf16: our kernels beside torch's, groups beside none.

Each is timed alone on the device; what a step takes is more than the sum where launches or caches cost.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import device_turns
from lockstep.backends.cuda import CudaBackend
from lockstep.config import Config, Layer, resolve
from lockstep.network import convolution, dropout, kernels
from lockstep.network.lrn import LocalResponseNorm
from lockstep.network.pool import ReluMaxPool
from lockstep.network.working import Update

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
_CALLS = 10


def run(setting: Setting, work: Path, record: Record) -> None:
    backend = CudaBackend("cuda:0")
    backend.start_computing(Config())
    torch.backends.cudnn.benchmark = True
    found: dict[str, dict[str, float]] = {}
    for name, make in _layers(setting, backend).items():
        with record.attempt(name):
            step = make()
            for _ in range(3):
                step()
            driver, stream = backend.memory.driver, backend.stream
            seconds = device_turns({name: step}, driver, stream, _CALLS, setting.n_rounds)[name]
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
    layers["conv1, conv_forms: space_to_depth"] = partial(
        _convolution_in, "space_to_depth", _shape(setting, 3, 227), (96, 11, 4, 0, 1), place
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
    problem = kernels.install(nn.Sequential(module), Config(), backend.memory, backend.stream)
    if problem:
        raise RuntimeError(problem)
    return _module(module, shape, place)


def _dropout(which: str, shape: tuple[int, ...], place: str, backend: CudaBackend) -> Callable[[], object]:
    model = nn.Sequential(nn.Dropout())
    layers = dropout.install(model)
    kernels.install(
        model, resolve([Layer("benchmark", {"kernels": which})])[0], backend.memory, backend.stream
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
    form: str, shape: tuple[int, ...], sizes: tuple[int, ...], place: str
) -> Callable[[], object]:
    """Forward, and backward for the weights, by a layer in another form."""
    outputs, kernel, stride, padding, groups = sizes
    x = _random(shape, place)
    layer = nn.Conv2d(shape[1], outputs, kernel, stride, padding, 1, groups, bias=False)
    layer = layer.to(place, x.dtype)
    convolution.install(layer, resolve([Layer("benchmark", {"conv_forms": form})])[0])
    gradient = _random(tuple(layer(x).shape), place)

    def step() -> None:
        torch.autograd.grad(layer(x), layer.weight, gradient)

    return step


def _update(n_elements: int, place: str, backend: CudaBackend) -> Callable[[], object]:
    weight, low = torch.zeros(n_elements, device=place), torch.bfloat16
    update = Update(weight, weight.to(low), torch.ones(n_elements, dtype=low, device=place))
    update.momenta, update.rate, update.decay = torch.zeros_like(weight), 0.01, 0.0005
    return partial(kernels.SgdKernel(backend.memory, backend.stream).step, [update], 0.9, False)


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
