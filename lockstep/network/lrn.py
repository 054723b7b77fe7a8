"""Local response normalisation with its gradient in closed form: two passes and little memory.

Krizhevsky, Sutskever, Hinton 2012, section 3.3: with s_i = k + alpha * sum of x_j^2 over n neighbouring
channels j, y_i = x_i / s_i^beta. Neighbourhood is symmetric, so the gradient is

    dx_i = g_i / s_i^beta - 2 alpha beta x_i * sum over neighbours j of (g_j x_j / s_j^(beta + 1))
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from lockstep.kernels.lrn import LrnKernel


class LocalResponseNorm(nn.Module):
    """Local response normalisation of x (batch, channel, row, column).

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
        is_available = torch.amp.is_autocast_available(device)  # not for meta tensors
        if not (is_available and torch.is_autocast_enabled(device)):  # plain, so that exporters can trace it
            return F.conv2d(x, self.band(x))
        with torch.autocast(device, enabled=False):
            return F.conv2d(x, self.band(x))

    def band(self, x: torch.Tensor) -> torch.Tensor:
        """Return (channel, channel, 1, 1): one where channels are neighbours; a constant, not a buffer."""
        key = (x.shape[1], x.dtype, x.device)
        if key not in self._bands:
            channels = torch.arange(x.shape[1], device=x.device)
            near = (channels[:, None] - channels).abs() <= self.n // 2
            self._bands[key] = near[:, :, None, None].to(x.dtype)
        return self._bands[key]


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
    return root.sqrt().mul_(root)
