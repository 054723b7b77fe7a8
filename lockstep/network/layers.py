"""Layers that a GPU can compute in Lockstep's CUDA kernels, and the installation of these kernels.

`LocalResponseNorm` and `ReluMaxPool` are AlexNet's; dropout.py has a third one. Each layer has an
implementation in torch, and uses its `kernel` if the back end has installed one, as `custom_kernels` asks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.kernels.dropout import DropoutKernel
from lockstep.kernels.lrn import LrnKernel
from lockstep.kernels.pool import PoolKernel
from lockstep.kernels.sgd import SgdKernel
from lockstep.memory.cuda import CudaMemory
from lockstep.network.convolution import Convolution
from lockstep.network.dropout import SampleDropout
from lockstep.network.low_precision import LowPrecisionWeights, operand

INSTALLED, UNAVAILABLE = "CUDA kernel", "torch, because the CUDA kernel is unavailable"


class LocalResponseNorm(nn.Module):
    """Local response normalisation of x (batch, channel, row, column), in two passes and little memory.

    Krizhevsky, Sutskever, Hinton 2012, section 3.3: with s_i = k + alpha * sum of x_j^2 over n neighbouring
    channels j, y_i = x_i / s_i^beta. Neighbourhood is symmetric, so the gradient has a closed form:

        dx_i = g_i / s_i^beta - 2 alpha beta x_i * sum over neighbours j of (g_j x_j / s_j^(beta + 1))

    It differs from nn.LocalResponseNorm, which divides alpha by n and is several times slower. The sums are a
    1 x 1 convolution with a band matrix: one pass over channels-last memory, for which GPUs have matrix
    units.

    Attributes:
        kernel: Computes each direction in one launch on a GPU, if the back end has installed it.
    """

    def __init__(self, n: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75) -> None:
        super().__init__()
        if n < 1 or n % 2 == 0:
            raise ValueError(f"n, the channels of a normalisation, must be odd: {n}")
        self.n, self.k, self.alpha, self.beta = n, k, alpha, beta
        self.kernel: LrnKernel | None = None
        self._bands: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
            wide = _wide(x)
            result = (wide * _power(self.sums(wide), self.beta)).to(x.dtype)
        else:
            result = _ClosedForm.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return s: k + alpha times the neighbours' squares; x is float32 or wider, and so is s."""
        return self.add_neighbours(x * x).mul_(self.alpha).add_(self.k)

    def add_neighbours(self, x: torch.Tensor) -> torch.Tensor:
        """Return each channel's sum over its neighbours, in x's dtype, also within autocast."""
        device = x.device.type
        # Meta tensors have no autocast. Plain, so that exporters and torch.compile can trace it.
        if x.is_meta or not torch.is_autocast_enabled(device):
            return F.conv2d(x, self.band(x))
        with torch.autocast(device, enabled=False):
            return F.conv2d(x, self.band(x))

    def band(self, x: torch.Tensor) -> torch.Tensor:
        """Return (channel, channel, 1, 1): one where channels are neighbours; a constant, not a buffer."""
        key = (x.shape[1], x.dtype, x.device)
        band = self._bands.get(key)
        if band is None:
            channels = torch.arange(x.shape[1], device=x.device)
            near = (channels[:, None] - channels).abs() <= self.n // 2
            band = near[:, :, None, None].to(x.dtype)
            # A compiled graph's output is not kept: captured in a CUDA graph, the next step overwrites it.
            if not torch.compiler.is_compiling():
                self._bands[key] = band
        return band


class _ClosedForm(torch.autograd.Function):
    """The normalisation with the closed form of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: LocalResponseNorm) -> torch.Tensor:
        ctx.norm = norm
        ctx.kernel = norm.kernel if norm.kernel is not None and norm.kernel.takes(x, norm) else None
        if ctx.kernel is not None:
            ctx.save_for_backward(x)
            y: torch.Tensor = ctx.kernel.forward(x, norm)
            return y
        wide = _wide(x)
        sums = norm.sums(wide)
        scale = _power(sums, norm.beta)
        ctx.save_for_backward(x, sums, scale)
        return (wide * scale).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        norm = ctx.norm
        if ctx.kernel is not None:
            (x,) = ctx.saved_tensors
            gradient = gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
            return ctx.kernel.backward(x, gradient, norm), None
        x, sums, scale = ctx.saved_tensors
        scaled = gradient * scale
        total = norm.add_neighbours((scaled * x).div_(sums)).mul_(x).mul_(-2 * norm.alpha * norm.beta)
        return total.add_(scaled).to(x.dtype), None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32 if it is of lower precision, as lrn.cu computes, else unchanged."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def _power(base: torch.Tensor, beta: float) -> torch.Tensor:
    """Return base^-beta; for the published beta by square roots, several times cheaper than a power."""
    if beta != 0.75:
        return base.pow(-beta)
    root = base.rsqrt()
    if torch.compiler.is_compiling():  # autograd differentiates it there, and needs the square root itself
        return root.sqrt() * root
    return root.sqrt().mul_(root)


class ReluMaxPool(nn.Module):
    """max_pool2d(relu(x), size, stride) for x (batch, channel, row, column).

    Attributes:
        kernel: Computes it on a GPU, if the back end has installed it. For the backward pass it stores one
            byte for each output; torch stores an int64 and the rectified x.
    """

    def __init__(self, size: int, stride: int) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.kernel: PoolKernel | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._pool(x, None)

    def behind(self, convolution: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the pooled output of a convolution: the values of `self(convolution(x))`.

        A kernel adds the bias to the maxima, which are fewer numbers. If rounding makes two numbers of a
        window equal after the bias is added, the gradient goes to the one that was larger, not to the first.
        """
        adds_bias = self.kernel is not None and self.kernel.adds_biases and not torch.compiler.is_compiling()
        if adds_bias and isinstance(convolution, Convolution):
            return self._pool(convolution(x, adds_bias=False), operand(convolution, "bias"))
        return self._pool(convolution(x), None)

    def _pool(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the pooled x plus the bias (channel,), if any, that the convolution has left out."""
        bias = None if bias is None else bias.to(x.dtype)
        if torch.compiler.is_compiling() or self.kernel is None or not self.kernel.takes(x, self, bias):
            # Rectify after pooling: the same values and gradients to the bit, and fewer numbers to rectify.
            pooled = F.max_pool2d(x, self.size, self.stride)
            return torch.relu(pooled if bias is None else pooled + bias[:, None, None])
        y: torch.Tensor = _PoolInKernel.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return y


class _PoolInKernel(torch.autograd.Function):
    """ReLU and max pooling by the CUDA kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, pool: ReluMaxPool) -> torch.Tensor:
        ctx.kernel, ctx.pool, ctx.shape = pool.kernel, pool, x.shape
        y: torch.Tensor
        y, places = ctx.kernel.forward(x, pool, bias)
        ctx.save_for_backward(places)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (places,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        to_x = to_bias = None
        if ctx.needs_input_grad[1]:
            to_bias = ctx.kernel.bias_gradient(gradient, places).sum(0).to(gradient.dtype)
        if ctx.needs_input_grad[0]:
            to_x = ctx.kernel.backward(gradient, places, ctx.shape, ctx.pool)
        return to_x, to_bias, None


def install_kernels(model: nn.Module, config: Config, memory: CudaMemory, stream: Any) -> dict[str, str]:
    """Install the kernels that `custom_kernels` names in the model's layers.

    A layer computes in torch if its kernel cannot be built for this device.

    Args:
        stream: The stream in which torch computes.

    Returns:
        How each kind of layer is computed.
    """
    layers: dict[str, tuple[Any, Any]] = {
        "lrn": (LocalResponseNorm, LrnKernel),
        "dropout": (SampleDropout, DropoutKernel),
        "pool": (ReluMaxPool, PoolKernel),
    }
    implementations = {}
    for name, (kind, make) in layers.items():
        users = [module for module in model.modules() if isinstance(module, kind)]
        if users:
            implementations[name] = _give(users, name, config, partial(make, memory, stream))
        else:
            implementations[name] = "no such layer"
    return implementations


def install_step_kernel(
    weights: LowPrecisionWeights | None, config: Config, memory: CudaMemory, stream: Any
) -> dict[str, str]:
    """Install the kernel of SGD on weights with bfloat16 copies. Arguments are those of `install_kernels`.

    Returns:
        How the step is computed, under the key 'sgd'.
    """
    if weights is None or not weights.keeps_gradients:
        return {"sgd": "torch: the CUDA kernel is for sgd with precision: bf16 and trainers that step alone"}
    return {"sgd": _give([weights], "sgd", config, partial(SgdKernel, memory, stream))}


def is_asked(name: str, config: Config) -> bool:
    """Return whether `custom_kernels` allows this kernel."""
    return config.custom_kernels in ("all", name)


def _give(users: Sequence[Any], name: str, config: Config, make: Callable[[], Any]) -> str:
    """Construct one kernel and give it to all its users; return how they compute."""
    if not is_asked(name, config):
        return f"torch, by custom_kernels: {config.custom_kernels}"
    try:
        kernel = make()
    except UserError as error:
        return f"{UNAVAILABLE}: {error}"
    for user in users:
        user.kernel = kernel
    return INSTALLED
