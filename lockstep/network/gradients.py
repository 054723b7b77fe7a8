"""Gradients in a shared block laid out as the weights, for rules that exchange them.

Backward leaves nothing in memory of autograd's own: fully connected layers write theirs into the block
(linear.py), and what autograd makes of the other parameters is copied there at once and let go of. Of some
fully connected layers there are factors instead (factors.py).
"""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.exchange import ALIGNMENT, Span
from lockstep.memory import Block, Memory
from lockstep.network import linear
from lockstep.network.arena import Arena
from lockstep.network.factors import Factors

_BUCKET = 1 << 22  # elements at least, 16 MB of float32; not measured on GPUs


class Gradients:
    """flat: (n,), laid out as the arena's weights and buffers but for the leading ones, which have factors.

    It is zero at first, and padding stays zero. Behind the gradients the trainer's buffers have a place, for
    they are averaged with them. shift: what the elements of the arena have before those of `flat`.
    buckets: consecutive spans of the arena, those first whose gradients backward finds first.
    when_full: called in backward with the number of a bucket when nothing is to come into it any more.
    """

    def __init__(
        self, model: nn.Module, arena: Arena, memory: Memory, factors: Factors | None = None
    ) -> None:
        self._arena, self.factors, self.shift = arena, factors, arena.n_leading
        dtype, n_elements = arena.flat.dtype, max(arena.n_exchanged - self.shift, ALIGNMENT)
        self.block: Block = memory.allocate(n_elements * dtype.itemsize, "gradients")
        self.flat = self.block.tensor(dtype, (n_elements,))
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._names = {value: name for name, value in self.trained.items() if factors and name in factors}
        plain = {name: value for name, value in self.trained.items() if value not in self._names}
        views = arena.views("gradients", self.flat, plain, self.shift)
        self._views = {value: views[f"gradients/{name}"] for name, value in plain.items()}
        spans = {value: arena.span_of(name) for name, value in plain.items()}
        self.buckets = _buckets(sorted(spans.values()), (self.shift, arena.n_exchanged))
        self._members = [
            {value for value, (start, _) in spans.items() if first <= start < last}
            for first, last in self.buckets
        ]
        self.when_full: Callable[[int], None] | None = None
        self.filled: set[nn.Parameter] = set()  # since the last `clear`
        self._full: set[int] = set()  # buckets
        self._is_complete = False
        self._missing = [set(members) for members in self._members]  # in buckets, since `begin_backward`
        linear.install(model, self)
        for parameter in self.trained.values():
            take = self._take if parameter in self._views else self._refuse
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def of(self, span: Span) -> torch.Tensor:
        """The gradient of a piece of the arena, (n,). Of what has factors, a piece that was planned."""
        if span[0] < self.shift:
            assert self.factors
            return self.factors.place(span)
        return self.flat[span[0] - self.shift : span[1] - self.shift]

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds to the gradient of a parameter; the first since `clear` replaces what was there."""
        view = self._views[parameter]
        if parameter in self.filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.filled.add(parameter)

    def add_product(self, weight: nn.Parameter, errors: torch.Tensor, inputs: torch.Tensor) -> None:
        """Adds errors^T inputs, (n, out) and (n, in), to the gradient of a weight (out, in)."""
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
        """Before one of the backward passes of a step: no bucket is full before it has passed it again."""
        self._missing = [set(members) for members in self._members]
        self._full.clear()

    def complete(self) -> None:
        """At the end of backward: a parameter without a gradient has one of zeros; buffers come in."""
        if self._is_complete:
            return
        self._is_complete = True
        for parameter, view in self._views.items():
            if parameter not in self.filled:
                view.zero_()
        if self.factors:
            self.factors.complete()
        for number in range(len(self.buckets)):
            if number not in self._full:
                self._fill(number)

    def clear(self) -> None:
        """The next gradients replace these."""
        self._is_complete = False
        self.filled.clear()
        if self.factors:
            self.factors.clear()
        self._full.clear()

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # of a weight whose gradient is made in its place autograd has none
            self.add(parameter, parameter.grad)
            parameter.grad = None
        if self.when_full and parameter in self.filled:
            for number, missing in enumerate(self._missing):
                if parameter in missing:
                    missing.remove(parameter)
                    if not missing:
                        self._fill(number)

    def _refuse(self, parameter: torch.Tensor) -> None:
        """Raises UserError where autograd has a gradient of a weight that has factors."""
        if parameter.grad is not None:
            assert isinstance(parameter, nn.Parameter)
            name = self._names[parameter]
            raise UserError(
                f"factors: {name} is used by more than its own layer, which the trial before training could "
                "not show: set factors: false"
            )

    def _fill(self, number: int) -> None:
        """Nothing is to come into a bucket; the first has the buffers, which forward has changed."""
        if number == 0:
            first, last = self._arena.buffers_span
            if first < last:
                self.of((first, last)).copy_(self._arena.flat[first:last])
        self._full.add(number)
        if self.when_full:
            self.when_full(number)


def _buckets(parameters: list[Span], whole: Span) -> list[Span]:
    """Cuts `whole`, in which parameters lie and buffers behind them, before parameters, from the last on."""
    found, last = [], whole[1]
    for first, _ in reversed(parameters):
        if last - first >= _BUCKET and first > whole[0]:
            found.append((first, last))
            last = first
    return [*found, (whole[0], last)]
