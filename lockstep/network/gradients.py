"""Gradients in a shared block laid out as the weights, for rules that exchange them.

Backward leaves nothing in memory of autograd's own: fully connected layers write theirs into the block
(linear.py), and what autograd makes of the other parameters is copied there at once and let go of.
"""

import torch
from torch import nn

from lockstep.memory import Block, Memory
from lockstep.network import linear
from lockstep.network.arena import Arena


class Gradients:
    """flat: (n,), laid out as the arena's weights and buffers, zero at first; padding stays zero.

    Behind the gradients the trainer's buffers have a place, for they are averaged with them.
    """

    def __init__(self, model: nn.Module, arena: Arena, memory: Memory) -> None:
        self._arena = arena
        dtype, n_elements = arena.flat.dtype, arena.n_exchanged
        self.block: Block = memory.allocate(n_elements * dtype.itemsize, "gradients")
        self.flat = self.block.tensor(dtype, (n_elements,))
        views = arena.views("gradients", self.flat)
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._views = {value: views[f"gradients/{name}"] for name, value in self.trained.items()}
        self._buffers = arena.buffers_span
        self.filled: set[nn.Parameter] = set()  # since the last `clear`
        self._is_complete = False
        linear.install(model, self)
        for parameter in self._views:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

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
        view = self._views[weight]
        if errors.dtype != view.dtype:
            self.add(weight, errors.t() @ inputs)
        elif weight in self.filled:
            view.addmm_(errors.t(), inputs)
        else:
            torch.mm(errors.t(), inputs, out=view)
            self.filled.add(weight)

    def complete(self) -> None:
        """At the end of backward: a parameter without a gradient has one of zeros; buffers come in."""
        if self._is_complete:
            return
        self._is_complete = True
        for parameter, view in self._views.items():
            if parameter not in self.filled:
                view.zero_()
        first, last = self._buffers
        self.flat[first:last].copy_(self._arena.flat[first:last])

    def clear(self) -> None:
        """The next gradients replace these."""
        self._is_complete = False
        self.filled.clear()

    def _take(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # of a weight whose gradient is made in its place autograd has none
            assert isinstance(parameter, nn.Parameter)
            self.add(parameter, parameter.grad)
            parameter.grad = None
