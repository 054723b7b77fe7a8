"""Fully connected layers whose weights' gradients are products written where they are exchanged.

They hold most of a classical network's weights, and a gradient that is made in its place need not be copied.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from lockstep.network.gradients import Gradients


class InPlaceLinear(nn.Linear):
    """nn.Linear; while it trains, the gradient of its weight goes to `gradients`, not to autograd."""

    gradients: "Gradients"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)
        y: torch.Tensor = _Product.apply(x, self.weight, self.bias, self.gradients)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """x W^T + b for x (..., in), W (out, in), b (out,) or None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, gradients: "Gradients"
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.gradients = weight, gradients
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        """In the precision of the products forward, which autocast may have lowered."""
        (x,), (error,) = ctx.saved_tensors, errors
        rows, inputs = error.flatten(0, -2), x.to(error.dtype).flatten(0, -2)
        ctx.gradients.add_product(ctx.weight, rows, inputs)
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        to_x = (error @ ctx.weight.to(error.dtype)).to(x.dtype) if wants_x else None
        return to_x, None, rows.sum(0) if wants_bias else None, None


def install(model: nn.Module, gradients: "Gradients") -> None:
    """Makes every nn.Linear of the model one of ours: the same module, with another way back."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = InPlaceLinear
            module.gradients = gradients  # type: ignore[assignment]
