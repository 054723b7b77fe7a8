"""Local response normalisation with the gradient in closed form: two passes instead of what autograd keeps.

Krizhevsky, Sutskever, Hinton 2012, section 3.3: with s_i = k + alpha * sum of x_j^2 over n neighbouring
channels j, y_i = x_i / s_i^beta. Its gradient, since j is a neighbour of i where i is one of j:

    dx_i = g_i / s_i^beta - 2 alpha beta x_i * sum over neighbours j of (g_j x_j / s_j^(beta + 1))
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class LocalResponseNorm(nn.Module):
    """x: (batch, channel, row, column). Not nn.LocalResponseNorm: that one divides alpha by n, and is several
    times slower.

    The sums are a 1 x 1 convolution with a band matrix: one pass that lies channels last and that GPUs have
    matrix units for. kernel: does the same on a GPU in one launch each way, where a trainer has set it.
    """

    def __init__(self, n: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75) -> None:
        super().__init__()
        if n < 1 or n % 2 == 0:
            raise ValueError(f"n, the channels of a normalisation, is odd: not {n}")
        self.n, self.k, self.alpha, self.beta = n, k, alpha, beta
        self.kernel: Kernel | None = None
        self._bands: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
            result = x * _power(self.sums(x), self.beta).to(x.dtype)  # as others' programs can take it over
        else:
            result = _ClosedForm.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """s: k + alpha times the neighbours' squares."""
        return F.conv2d(x * x, self.band(x)).mul_(self.alpha).add_(self.k)

    def band(self, x: torch.Tensor) -> torch.Tensor:
        """(channel, channel, 1, 1): one where channels are neighbours; a constant, so no buffer."""
        place = (x.shape[1], x.dtype, x.device)
        if place not in self._bands:
            channels = torch.arange(x.shape[1], device=x.device)
            near = (channels[:, None] - channels).abs() <= self.n // 2
            self._bands[place] = near[:, :, None, None].to(x.dtype)
        return self._bands[place]


class Kernel(Protocol):
    """Both directions of a normalisation on a device (kernels.py)."""

    def takes(self, x: torch.Tensor, norm: LocalResponseNorm) -> bool:
        """Whether it can do this one."""

    def forward(self, x: torch.Tensor, norm: LocalResponseNorm) -> torch.Tensor:
        """y."""

    def backward(self, x: torch.Tensor, gradient: torch.Tensor, norm: LocalResponseNorm) -> torch.Tensor:
        """dx. gradient: channels last and of x's dtype, as x."""


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: LocalResponseNorm) -> torch.Tensor:
        ctx.norm = norm
        ctx.kernel = norm.kernel if norm.kernel is not None and norm.kernel.takes(x, norm) else None
        if ctx.kernel is not None:
            ctx.save_for_backward(x)
            made: torch.Tensor = ctx.kernel.forward(x, norm)
            return made
        sums = norm.sums(x)
        scale = _power(sums, norm.beta)
        ctx.save_for_backward(x, sums, scale)
        return x * scale.to(x.dtype)

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
        part = (scaled * x).div_(sums).to(x.dtype)
        total = F.conv2d(part, norm.band(x)).mul_(x).mul_(-2 * norm.alpha * norm.beta)
        return total.add_(scaled), None


def _power(base: torch.Tensor, beta: float) -> torch.Tensor:
    """base^-beta; the published beta by two roots, which is several times cheaper than a power."""
    if beta != 0.75:
        return base.pow(-beta)
    root = base.rsqrt()
    return root.sqrt().mul_(root)
