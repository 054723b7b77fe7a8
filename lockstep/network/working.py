"""Weights in bfloat16 for products, kept beside their float32 masters (`precision: bf16`).

Autocast makes a copy of every weight in each forward pass, and a float32 gradient of each in the backward
pass. Here the copies lie in the arena's block, behind the masters, and the gradients of a step stay bfloat16
until it is taken: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1. The bits are autocast's.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lockstep.network.arena import Arena
from lockstep.optim.fused import FusedSGD

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE = 1 << 20  # elements that a step on a CPU takes at a time: what it needs of them stays in the cache
_LAYERS = (nn.Conv2d, nn.Linear)  # whose weights and biases autocast takes in bfloat16, and nothing else


class UpdateKernel(Protocol):
    """SGD with momentum in one launch, with bfloat16 gradients, that can write copies too (kernels.py)."""

    def step(self, updates: "Sequence[Update]", momentum: float, nesterov: bool) -> None:
        """Of all tensors."""


class Update:
    """What a step does with one parameter; all of n elements, in the same order in memory.

    weight, gradient: (n,). copy: (n,), or None where it is not wanted. momenta: (n,), or None without
    momentum. rate, decay: of this parameter.
    """

    __slots__ = ("copy", "decay", "gradient", "momenta", "rate", "weight")

    def __init__(self, weight: torch.Tensor, copy: torch.Tensor | None, gradient: torch.Tensor) -> None:
        self.weight, self.copy, self.gradient = weight, copy, gradient
        self.momenta: torch.Tensor | None = None
        self.rate = self.decay = 0.0


class WorkingWeights:
    """Copies of a model's weights, which its layers take by `operand` wherever autocast is on.

    stale: whether weights have changed since the copies were made. keeps_gradients: whether the first
    gradient of a weight in a step is kept as it comes, in `gradients`, for `step`; else all are autograd's.
    averaged: whether weights change again after each step, so that it writes no copies. kernel: takes the
    step on a GPU, where a trainer has set it.
    """

    def __init__(self, model: nn.Module, arena: Arena) -> None:
        assert arena.working is not None
        self._flat, self._masters = arena.working, arena.flat[: arena.n_weights]
        self._device = arena.flat.device.type
        uses = [value for _, value in model.named_parameters(remove_duplicate=False)]
        views = arena.views("working", self._flat, [name for name, _ in model.named_parameters()])
        names = {value: name for name, value in model.named_parameters()}
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._spans: dict[torch.Tensor, slice] = {
            value: slice(*arena.span_of(name)) for value, name in names.items()
        }
        for module in model.modules():
            if type(module) in _LAYERS:
                module.working = self  # type: ignore[assignment]
                own = [value for value in module.parameters(recurse=False) if _is_once(value, uses)]
                self._copies |= {value: views[f"working/{names[value]}"] for value in own}
        self.stale, self.keeps_gradients, self.averaged = True, False, False
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.kernel: UpdateKernel | None = None
        self._scratch: torch.Tensor | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """What a product takes of a weight: its copy, unless autocast is off or averages are bound."""
        copy = self._copies.get(weight)
        if copy is None or not torch.is_autocast_enabled(self._device):
            return weight
        if weight.data_ptr() != self._masters[self._spans[weight]].data_ptr():
            return weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return copy
        taken: torch.Tensor = _Copy.apply(weight, copy, self)  # type: ignore[no-untyped-call]
        return taken

    def refresh(self) -> None:
        """Before a forward pass: makes the copies, where weights have changed."""
        if self.stale:
            self._flat.copy_(self._masters)
            self.stale = False

    def receive(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """A gradient of a weight, bfloat16. Returns what autograd is to add up, float32."""
        if not self.keeps_gradients:
            return gradient.float()
        if weight not in self.gradients and weight.grad is None:
            self.gradients[weight] = gradient
            return None
        self._hand_over(weight)
        return gradient.float()

    def step(self, optimizer: FusedSGD) -> None:
        """Takes the step of the weights whose gradients were kept; writes all copies, unless averaged."""
        momentum, updates, updated = optimizer.momentum, [], set(self.gradients)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                gradient = self.gradients.pop(weight, None)
                if gradient is not None:
                    update = self._update(weight, gradient)
                    update.rate, update.decay = group["lr"], group["weight_decay"]
                    if momentum:
                        state = optimizer.state[weight]["momentum_buffer"]
                        update.momenta = state.as_strided((len(update.weight),), (1,))
                    updates.append(update)
        if self.kernel is not None:
            self.kernel.step(updates, momentum, optimizer.nesterov)
        else:
            self._step(optimizer, updates)
        self.stale = self.averaged
        if self.averaged:
            return
        for weight in self._copies.keys() - updated:  # whose gradients were autograd's
            self._copies[weight].copy_(weight.detach())

    def _hand_over(self, weight: torch.Tensor) -> None:
        gradient = self.gradients.pop(weight, None)
        if gradient is not None:
            weight.grad = gradient.float()

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor) -> Update:
        if gradient.stride() != weight.stride():
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        span = self._spans[weight]
        flat = gradient.as_strided((weight.numel(),), (1,))
        return Update(self._masters[span], None if self.averaged else self._flat[span], flat)

    @torch.no_grad()
    def _step(self, optimizer: FusedSGD, updates: "list[Update]") -> None:
        """By torch, in pieces: their gradients in float32 are never in memory as a whole."""
        if self._scratch is None:
            self._scratch = torch.empty(_PIECE, dtype=self._masters.dtype, device=self._masters.device)
        for each in updates:
            for first in range(0, len(each.weight), _PIECE):
                here = slice(first, first + _PIECE)
                weight = each.weight[here]
                gradient = self._scratch[: len(weight)].copy_(each.gradient[here])
                momenta = [] if each.momenta is None else [each.momenta[here]]
                optimizer.update([weight], [gradient], momenta, each.rate, each.decay)
                if each.copy is not None:
                    each.copy[here].copy_(weight)


class _Copy(torch.autograd.Function):
    """A weight's copy in its place; its gradient goes to the WorkingWeights."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor, working: WorkingWeights) -> torch.Tensor:
        ctx.weight, ctx.working = weight, working
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return ctx.working.receive(ctx.weight, gradients[0]), None, None


def operand(module: nn.Module, name: str) -> torch.Tensor:
    """A weight of a layer as its products take it."""
    weight: torch.Tensor = getattr(module, name)
    working: WorkingWeights | None = getattr(module, "working", None)
    return weight if working is None or weight is None else working.of(weight)


def _is_once(value: torch.Tensor, uses: "list[nn.Parameter]") -> bool:
    return sum(other is value for other in uses) == 1
