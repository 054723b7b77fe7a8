"""Fully connected layers whose weights' gradients are products written where they are exchanged.

They hold most of a classical network's weights, and a gradient that is made in its place need not be copied.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.network.working import operand

if TYPE_CHECKING:
    from lockstep.network.gradients import Gradients


class Linear(nn.Linear):
    """nn.Linear, with its weights as `operand` gives them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, operand(self, "weight"), operand(self, "bias"))


class InPlaceLinear(Linear):
    """While it trains, the gradient of its weight goes to `gradients`, not to autograd."""

    gradients: "Gradients"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)
        y: torch.Tensor = _Product.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """x W^T + b for x (..., in), W (out, in), b (out,) or None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, layer: InPlaceLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.gradients, ctx.operand = weight, layer.gradients, operand(layer, "weight")
        return F.linear(x, ctx.operand, operand(layer, "bias"))

    @staticmethod
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        """In the precision of the products forward, which autocast may have lowered."""
        (x,), (error,) = ctx.saved_tensors, errors
        rows, inputs = error.flatten(0, -2), x.to(error.dtype).flatten(0, -2)
        ctx.gradients.add_product(ctx.weight, rows, inputs)
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        to_x = (error @ ctx.operand.to(error.dtype)).to(x.dtype) if wants_x else None
        return to_x, None, rows.sum(0) if wants_bias else None, None


def use_operands(model: nn.Module) -> None:
    """Makes every nn.Linear of the model one of ours: the same module, which takes what `operand` gives."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def install(model: nn.Module, gradients: "Gradients") -> None:
    """The same, with another way back."""
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            module.__class__ = InPlaceLinear
            module.gradients = gradients  # type: ignore[assignment]
