"""Gradients in a shared block laid out as the weights, for rules that exchange gradients.

After backward no gradient is left in autograd's own memory. Fully connected layers write theirs into the
block (`InPlaceLinear`); the gradients of other parameters are copied there as soon as autograd has them. Some
fully connected layers have factors instead (factors.py).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import UserError
from lockstep.exchange import ALIGNMENT, Span
from lockstep.memory import Block
from lockstep.network.arena import Arena
from lockstep.network.factors import Factors
from lockstep.network.low_precision import Linear, has_hooks, is_transformed, operand

_BUCKET = 1 << 22  # least elements of a bucket: 16 MB of float32; not measured on GPUs


class Gradients:
    """The gradients of a step and, behind them, a copy of the float buffers, which are averaged with them.

    Attributes:
        flat: (n,), laid out as the arena's weights and buffers without the leading weights, which have
            factors. Zero at first; padding stays zero.
        further: More such tensors behind `flat`, for partial sums of logical ranks.
        whole: All of them, as one tensor.
        shift: Element of the arena at which `flat` begins.
        all_buckets: Consecutive spans of the arena, in the order in which backward completes them. One begins
            where the frozen weights end.
        is_open: Whether gradients go to this block: in a step's backward pass, and not where a network
            computes gradients of its own in its forward pass.
        when_full: Called in backward with the number of each bucket that is complete, or None.
        filled: Parameters that have a gradient since the last `clear`.
    """

    def __init__(
        self, model: nn.Module, arena: Arena, factors: Factors | None = None, n_sums: int = 1
    ) -> None:
        self._arena, self.factors, self.shift = arena, factors, arena.n_leading
        dtype, n_elements = arena.flat.dtype, max(arena.n_exchanged - self.shift, ALIGNMENT)
        what = "gradients" if n_sums == 1 else f"{n_sums} partial sums of gradients: see shares"
        self.block: Block = arena.memory.allocate(n_sums * n_elements * dtype.itemsize, what)
        self.whole = self.block.tensor(dtype, (n_sums * n_elements,))
        self.flat = self.whole[:n_elements]
        self.further = list(torch.split(self.whole, n_elements))[1:]
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._names = {value: name for name, value in self.trained.items() if factors and name in factors}
        plain = {name: value for name, value in self.trained.items() if value not in self._names}
        views = arena.views("gradients", self.flat, plain, self.shift)
        self._views = {value: views[f"gradients/{name}"] for name, value in plain.items()}
        spans = {value: arena.span_of(name) for name, value in plain.items()}
        whole = self.shift, arena.n_exchanged
        self.all_buckets = _buckets(sorted(spans.values()), whole, arena.n_frozen)
        self._members = [
            {value for value, (start, _) in spans.items() if first <= start < last}
            for first, last in self.all_buckets
        ]
        self.is_open = False
        self.when_full: Callable[[int], None] | None = None
        self.filled: set[nn.Parameter] = set()
        self._full: set[int] = set()  # numbers of buckets
        self._is_complete = False
        self._missing = [set(members) for members in self._members]  # of each bucket, in this backward pass
        self._in_place = {value for value in self.trained.values() if not has_hooks(value)}
        _write_in_place(model, self)
        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]

    @property
    def buckets(self) -> list[Span]:
        """The buckets without those of weights that are frozen at present."""
        return [bucket for bucket in self.all_buckets if bucket[0] >= self._arena.n_frozen]

    def of(self, span: Span) -> torch.Tensor:
        """Return the gradient (n,) of a piece of the arena; with factors, of a planned piece."""
        if span[0] < self.shift:
            assert self.factors
            return self.factors.gradient_of(span)
        return self.flat[span[0] - self.shift : span[1] - self.shift]

    def has_place_for(self, weight: torch.Tensor) -> bool:
        """Return whether a layer's weight is a trained parameter, not computed from one (pruning)."""
        return weight in self._in_place

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add to the gradient of a parameter; the first since `clear` replaces the old one."""
        view = self._views[parameter]
        if parameter in self.filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.filled.add(parameter)

    def add_product(self, weight: nn.Parameter, errors: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add errors^T inputs, (n, out) and (n, in), to the gradient of a weight (out, in)."""
        if self.factors and weight in self._names:
            self.factors.add(self._names[weight], errors, inputs)
            return
        view = self._views[weight]
        if errors.dtype != view.dtype:
            self.add(weight, errors.t() @ inputs)
        elif weight in self.filled:
            view.addmm_(errors.t(), inputs)
        else:
            torch.mm(errors.t(), inputs, out=view)
            self.filled.add(weight)

    def begin_backward(self) -> None:
        """Start a backward pass of the step: each bucket must be completed again before it is reported."""
        self._missing = [set(members) for members in self._members]
        self._full.clear()
        for parameter in self.trained.values():  # what a backward pass within the forward pass has left
            self._take(parameter)

    def complete(self) -> None:
        """Finish the step's backward passes: missing gradients become zeros, and buffers are copied in."""
        if self._is_complete:
            return
        self._is_complete = True
        for parameter, view in self._views.items():
            if parameter not in self.filled:
                view.zero_()
        if self.factors:
            self.factors.complete()
        for number in range(len(self.all_buckets)):
            if number not in self._full:
                self._fill(number)

    def clear(self) -> None:
        """Start a new step, whose gradients replace these."""
        self._is_complete = False
        self.filled.clear()
        if self.factors:
            self.factors.clear()
        self._full.clear()

    def _collect(self, parameter: torch.Tensor) -> None:
        """Move the gradient that autograd has computed into the block, and report full buckets."""
        assert isinstance(parameter, nn.Parameter)
        if not self.is_open:
            return
        self._take(parameter)
        if self.when_full and parameter in self.filled:
            for number, missing in enumerate(self._missing):
                if parameter in missing:
                    missing.remove(parameter)
                    if not missing:
                        self._fill(number)

    def _take(self, parameter: nn.Parameter) -> None:
        """Move autograd's gradient of a parameter into the block.

        Raises:
            UserError: It is of a weight that has factors.
        """
        if parameter.grad is None:  # as of the weight of an InPlaceLinear
            return
        if parameter in self._names:
            raise UserError(
                f"factors: {self._names[parameter]} is used by more than its own layer, which the trial "
                "before training could not show. Set factors: false."
            )
        self.add(parameter, parameter.grad)
        parameter.grad = None

    def _fill(self, number: int) -> None:
        """Mark a bucket as full; the first bucket gets the buffers, which forward has changed."""
        if number == 0:
            first, last = self._arena.buffers_span
            if first < last:
                self.of((first, last)).copy_(self._arena.flat[first:last])
        self._full.add(number)
        if self.when_full:
            self.when_full(number)


def _buckets(parameters: list[Span], whole: Span, cut: int) -> list[Span]:
    """Cut the span `whole` into buckets at the beginnings of parameters and at `cut`, last bucket first."""
    buckets, last = [], whole[1]
    for first in sorted({cut, *(first for first, _ in parameters)}, reverse=True):
        if (last - first >= _BUCKET or first == cut) and first > whole[0]:
            buckets.append((first, last))
            last = first
    return [*buckets, (whole[0], last)]


class InPlaceLinear(Linear):
    """A `Linear` whose weight's gradient goes to `gradients` in a step's backward pass, not to autograd."""

    gradients: Gradients

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        in_place = torch.is_grad_enabled() and self.weight.requires_grad and input.dim() > 1
        if not in_place or is_transformed() or not self.gradients.has_place_for(self.weight):
            return super().forward(input)
        y: torch.Tensor = _LinearFunction.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return y


class _LinearFunction(torch.autograd.Function):
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
        """Compute gradients in the precision of the forward products, which autocast may have lowered."""
        (x,), (error,) = ctx.saved_tensors, errors
        rows, inputs, to_weight = error.flatten(0, -2), x.to(error.dtype).flatten(0, -2), None
        if ctx.gradients.is_open:
            ctx.gradients.add_product(ctx.weight, rows, inputs)
        else:
            to_weight = (rows.t() @ inputs).to(ctx.weight.dtype)
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        # A copy of lower precision has no graph, which the gradient of this gradient needs.
        weight = ctx.weight if torch.is_grad_enabled() else ctx.operand
        to_x = (error @ weight.to(error.dtype)).to(x.dtype) if needs_x else None
        return to_x, to_weight, rows.sum(0) if needs_bias else None, None


def _write_in_place(model: nn.Module, gradients: Gradients) -> None:
    """Make every nn.Linear and `Linear` of the model an `InPlaceLinear`, in place."""
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            module.__class__ = InPlaceLinear
            module.gradients = gradients  # type: ignore[assignment]
