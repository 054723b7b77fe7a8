"""ReLU followed by max pooling, which a GPU can compute in one launch each way."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.network.convolution import Convolution
from lockstep.network.low_precision import operand

if TYPE_CHECKING:
    from lockstep.kernels.pool import PoolKernel


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
        adds_bias = self.kernel is not None and self.kernel.adds_biases and not _is_compiling()
        if adds_bias and isinstance(convolution, Convolution):
            return self._pool(convolution(x, adds_bias=False), operand(convolution, "bias"))
        return self._pool(convolution(x), None)

    def _pool(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the pooled x plus the bias (channel,), if any, that the convolution has left out."""
        bias = None if bias is None else bias.to(x.dtype)
        if _is_compiling() or self.kernel is None or not self.kernel.takes(x, self, bias):
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


def _is_compiling() -> bool:
    return torch.compiler.is_compiling()
