"""The precision in which a network computes, and bfloat16 copies of its float32 weights (`precision: bf16`).

Weights and momenta are float32 in the arena in any case. With bf16, autocast alone would make a copy of every
weight in each forward pass, and a float32 gradient of each in the backward pass. Here the copies lie in the
arena's block, behind the float32 weights, and a step's gradients stay bfloat16 until the step is taken:
Micikevicius et al. 2018, arXiv 1710.03740, section 3.1. The results have autocast's bits.
"""

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Config
from lockstep.network.arena import Arena
from lockstep.optim.fused import FusedSGD

if TYPE_CHECKING:
    from lockstep.kernels.sgd import SgdKernel

_PIECE = 1 << 20  # elements of one piece of a step on a CPU; a piece's operands fit into the cache


def configure(config: Config) -> None:
    """Set torch's global switches for precision and determinism in this process.

    fp32 is IEEE single precision. tf32 multiplies 10-bit mantissas in the GPU's matrix units and adds in
    fp32. bf16 adds `autocast`. cuDNN benchmarks its algorithms unless runs must repeat exactly. On CPUs only
    the switches of determinism have an effect.
    """
    products = "tf32" if config.precision == "tf32" else "ieee"
    # Set the older switches as well: torch.compile, torch.export and torch.backends.cudnn.flags() read them,
    # and torch raises an error where they differ from the newer ones, also from that of recurrent layers.
    torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = products == "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]  # set with it
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = products  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        # Otherwise cuBLAS may change its order of sums.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass; with bf16, convolutions and products take and return bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def image_dtype(config: Config) -> Literal["bfloat16", "float32"]:
    """Return the dtype in which a GPU's augmentation kernel writes images."""
    return "bfloat16" if config.precision == "bf16" else "float32"


def keeps_copies(config: Config, model: nn.Module) -> bool:
    """Return whether to keep bfloat16 copies of the weights. torch.compile casts inside its kernels."""
    is_float32 = all(value.dtype == torch.float32 for value in model.parameters())
    return config.precision == "bf16" and not config.compile and is_float32


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether hooks of a user change the gradient of a parameter; they need it as autograd's."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_transformed() -> bool:
    """Return whether torch.func transforms what is computed, which takes plain operations only."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


class OperandLayer:
    """A layer whose products take its weights from `operand`: convolutions and fully connected layers.

    Autocast takes exactly the weights and biases of such layers in bfloat16.

    Attributes:
        low_precision: Holds bfloat16 copies of the layer's weights, or None.
    """

    low_precision: "LowPrecisionWeights | None" = None


@dataclass(slots=True, eq=False)
class Update:
    """One parameter's operands of a step, each of n elements in the same memory order."""

    weight: torch.Tensor  # float32 (n,)
    copy: torch.Tensor | None  # bfloat16 (n,), or None if the copy is not to be written
    gradient: torch.Tensor  # bfloat16 (n,)
    momenta: torch.Tensor | None = None  # float32 (n,), or None without momentum
    rate: float = 0.0  # the learning rate of this parameter
    decay: float = 0.0  # the weight decay of this parameter


class LowPrecisionWeights:
    """bfloat16 copies of a model's weights, which its layers use through `operand` wherever autocast is on.

    The model's layers are of Lockstep's own classes already (`use_operands`, convolution.install).

    Attributes:
        stale: Whether weights have changed since the copies were written.
        keeps_gradients: Whether the first gradient of a weight in a step is retained as bfloat16 in
            `gradients`, for `step`; otherwise all gradients are autograd's.
        is_open: Whether this is a step's backward pass, not one within the network's forward pass.
        averaged: Whether trainers average weights after each step, so that a step need not write copies.
        kernel: Takes the step on a GPU, if the back end has installed it.
    """

    def __init__(self, model: nn.Module, arena: Arena) -> None:
        assert arena.low_precision is not None
        self._flat, self._masters = arena.low_precision, arena.flat[: arena.n_weights]
        self._device = arena.flat.device.type
        uses = Counter(value for _, value in model.named_parameters(remove_duplicate=False))
        names = {value: name for name, value in model.named_parameters()}
        views = arena.views("copies", self._flat, names.values())
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._spans: dict[torch.Tensor, slice] = {
            value: slice(*arena.span_of(name)) for value, name in names.items()
        }
        for module in model.modules():
            if isinstance(module, OperandLayer):
                module.low_precision = self
                own = [
                    value
                    for value in module.parameters(recurse=False)
                    if uses[value] == 1 and not has_hooks(value)
                ]
                self._copies |= {value: views[f"copies/{names[value]}"] for value in own}
        self._versions: dict[torch.Tensor, int] = {}
        self.stale, self.keeps_gradients, self.averaged, self.is_open = True, False, False, False
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.kernel: SgdKernel | None = None
        self._scratch: torch.Tensor | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight's copy, or the weight if autocast is off, averages are bound, or it has changed."""
        copy = self._copies.get(weight)
        if copy is None or not torch.is_autocast_enabled(self._device) or is_transformed():
            return weight
        if weight.data_ptr() != self._masters[self._spans[weight]].data_ptr():
            return weight
        if weight._version != self._versions.get(weight):  # the network has changed it in this forward pass
            return weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return copy
        taken: torch.Tensor = _Copy.apply(weight, copy, self)  # type: ignore[no-untyped-call]
        return taken

    def refresh(self) -> None:
        """Write the copies before a forward pass, if weights have changed."""
        if self.stale:
            self._flat.copy_(self._masters)
            self._note_written()
            self.stale = False

    def _note_written(self) -> None:
        """Note that the copies are those of the weights as they are now."""
        self._versions = {weight: weight._version for weight in self._copies}

    def receive(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Receive a weight's bfloat16 gradient; return the float32 gradient that autograd adds, or None."""
        if not (self.keeps_gradients and self.is_open):
            return gradient.float()
        if weight not in self.gradients and weight.grad is None:
            self.gradients[weight] = gradient
            return None
        if weight in self.gradients:
            weight.grad = self.gradients.pop(weight).float()
        return gradient.float()

    def step(self, optimizer: FusedSGD) -> None:
        """Take the step of the weights whose gradients were retained; write all copies unless averaged."""
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
        for weight in self._copies.keys() - updated:  # autograd had their gradients
            self._copies[weight].copy_(weight.detach())
        self._note_written()

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor) -> Update:
        if gradient.stride() != weight.stride():
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        span = self._spans[weight]
        flat = gradient.as_strided((weight.numel(),), (1,))
        return Update(self._masters[span], None if self.averaged else self._flat[span], flat)

    @torch.no_grad()
    def _step(self, optimizer: FusedSGD, updates: "list[Update]") -> None:
        """Take the step in torch, in pieces, so that no whole float32 gradient is in memory."""
        if self._scratch is None:
            self._scratch = torch.empty(_PIECE, dtype=self._masters.dtype, device=self._masters.device)
        for each in updates:
            for first in range(0, len(each.weight), _PIECE):
                piece = slice(first, first + _PIECE)
                weight = each.weight[piece]
                gradient = self._scratch[: len(weight)].copy_(each.gradient[piece])
                momenta = [] if each.momenta is None else [each.momenta[piece]]
                optimizer.update([weight], [gradient], momenta, each.rate, each.decay)
                if each.copy is not None:
                    each.copy[piece].copy_(weight)


class _Copy(torch.autograd.Function):
    """The use of a weight's copy in its place; its gradient goes to the LowPrecisionWeights."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, copy: torch.Tensor, low_precision: LowPrecisionWeights
    ) -> torch.Tensor:
        ctx.weight, ctx.low_precision = weight, low_precision
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return ctx.low_precision.receive(ctx.weight, gradients[0]), None, None


def operand(layer: OperandLayer, name: str) -> torch.Tensor:
    """Return a layer's weight or bias as its products take it."""
    weight: torch.Tensor = getattr(layer, name)
    if layer.low_precision is None or weight is None:
        return weight
    return layer.low_precision.of(weight)


class Linear(nn.Linear, OperandLayer):
    """An nn.Linear with its weights in the precision of `operand`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, operand(self, "weight"), operand(self, "bias"))


def use_operands(model: nn.Module) -> None:
    """Make every nn.Linear of the model a `Linear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
