"""ReLU with max pooling behind it, which a GPU can do in one launch each way."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class ReluMaxPool(nn.Module):
    """max_pool2d(relu(x), size, stride), for x: (batch, channel, row, column).

    kernel: does it on a GPU, where a trainer has set it. It keeps a byte for each output for the backward
    pass, where torch keeps an int64 and the rectified x.
    """

    def __init__(self, size: int, stride: int) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.kernel: Kernel | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or self.kernel is None or not self.kernel.takes(x, self):
            # the same values and gradients to the bit, and fewer numbers to rectify
            return torch.relu(F.max_pool2d(x, self.size, self.stride))
        made: torch.Tensor = _InOneLaunch.apply(x, self)  # type: ignore[no-untyped-call]
        return made


class Kernel(Protocol):
    """Both directions on a device (kernels.py)."""

    def takes(self, x: torch.Tensor, pool: ReluMaxPool) -> bool:
        """Whether it can do this one."""

    def forward(self, x: torch.Tensor, pool: ReluMaxPool) -> tuple[torch.Tensor, torch.Tensor]:
        """y, and for each of its numbers the place in the window that it is from: uint8."""

    def backward(
        self, gradient: torch.Tensor, places: torch.Tensor, shape: torch.Size, pool: ReluMaxPool
    ) -> torch.Tensor:
        """dx, of the shape of x. gradient: channels last."""


class _InOneLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pool: ReluMaxPool) -> torch.Tensor:
        ctx.kernel, ctx.pool, ctx.shape = pool.kernel, pool, x.shape
        y: torch.Tensor
        y, places = ctx.kernel.forward(x, pool)
        ctx.save_for_backward(places)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        return ctx.kernel.backward(gradient, places, ctx.shape, ctx.pool), None
