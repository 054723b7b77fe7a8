"""Dropout whose masks are a function of (seed, epoch, sample, layer): the same for any number of trainers.

Models use plain `nn.Dropout`; `install` changes its class. Trainers see different samples, so their masks
differ. A sample's mask is the same on every trainer and device, and in a run that was resumed.
"""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.kernels.dropout import DropoutKernel


class SampleDropout(nn.Dropout):
    """Inverted dropout (Srivastava et al. 2014) with counter-based masks.

    Attributes:
        layer: Its number in the model.
        keys: int32 (batch,), one for each sample.
        kernel: Computes and applies the mask in one launch on a GPU, if the back end has installed it.
        n_calls: Calls in this step; a network may use one layer in several places.
        replays: Whether `recompute` calls it again, and has set n_calls.
    """

    layer = 0
    keys: torch.Tensor | None = None
    kernel: "DropoutKernel | None" = None
    n_calls = 0
    replays = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        # As in torch, with p = 1 the input has a gradient, and NaN shows.
        y = input * 0 if self.p == 1 else self._dropped(input)
        return input.copy_(y) if self.inplace else y

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        if self.keys is None:
            raise UserError(
                f"the model's dropout layer {self.layer} is in training mode outside of a training step, "
                "where its samples have no masks: call F.dropout there"
            )
        if _is_batched(x) or not x.dim() or len(x) % len(self.keys):
            return F.dropout(x, self.p)  # the rows are not samples: they are positions, or a part of one
        place = self.layer, self._next_call()
        if self.kernel is not None and self.kernel.takes(x, self.keys):
            y: torch.Tensor = _DropoutInKernel.apply(x, self, place)  # type: ignore[no-untyped-call]
            return y
        n_features = x.numel() // len(self.keys)
        keep = keep_mask(self.keys, place, n_features, self.p).view(x.shape)
        return x * keep.to(x.dtype).div_(1 - self.p)

    def _next_call(self) -> int:
        """Return the number of this call. torch.utils.checkpoint repeats a call while backward runs."""
        if self.n_calls and not self.replays and torch._C._current_graph_task_id() != -1:
            if self.n_calls > 1:
                raise UserError(
                    f"the model's dropout layer {self.layer} is called {self.n_calls} times in a step, and "
                    "torch.utils.checkpoint repeats one of these calls: use a layer for each call"
                )
            return 0
        self.n_calls += 1
        return self.n_calls - 1


def _is_batched(x: torch.Tensor) -> bool:
    """Return whether torch.func.vmap hides a dimension of x: its `randomness` then decides about masks."""
    functorch = torch._C._functorch
    while not functorch.is_batchedtensor(x):
        # torch.compile can't trace more than the first question: it finds a vmap of the layer itself.
        if torch.compiler.is_compiling() or not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return True


class _DropoutInKernel(torch.autograd.Function):
    """Dropout by the CUDA kernel, which recomputes the mask in the backward pass instead of storing it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SampleDropout, place: tuple[int, int]) -> torch.Tensor:
        keys = layer.keys
        # Divide in the dtype of x, as the implementation in torch does.
        factor = torch.ones((), dtype=x.dtype).div_(1 - layer.p).item()
        ctx.arguments = layer.kernel, keys, place, _least_kept(layer.p), factor
        return _apply(x, *ctx.arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _apply(gradient.contiguous(), *ctx.arguments), None, None


def _apply(x: torch.Tensor, kernel: Any, *arguments: Any) -> torch.Tensor:
    y: torch.Tensor = kernel.apply(x, *arguments)
    return y


def install(model: nn.Module) -> list[SampleDropout]:
    """Make every nn.Dropout of the model a SampleDropout; layers are numbered in the order of `modules()`.

    A layer stays the same object, with its mode, its hooks, and the user's attributes: the model may have it
    in a list of its own as well. Where it has a second place among the modules, a copy of it, which has other
    masks, takes that place.
    """
    installed: list[SampleDropout] = []
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Dropout:
                child.__class__ = SampleDropout
            elif isinstance(child, SampleDropout):
                module._modules[name] = copy.copy(child)
            made = module._modules[name]
            if isinstance(made, SampleDropout):
                made.layer = len(installed)
                installed.append(made)
    return installed


def set_keys(dropouts: list[SampleDropout], keys: torch.Tensor | None) -> None:
    """Set the samples of the next batch: int32 keys (batch,), on the network's device. None: no batch."""
    for module in dropouts:
        module.keys, module.n_calls = keys, 0


def sample_keys(seed: int, epoch: int, n_samples: int) -> np.ndarray:
    """Return one key for each sample of an epoch: int32 (n_samples,)."""
    random = generator(seed, epoch, Purpose.DROPOUT)
    return random.integers(-(2**31), 2**31, size=n_samples, dtype=np.int32)


def keep_mask(keys: torch.Tensor, place: tuple[int, int], n_features: int, p: float) -> torch.Tensor:
    """Return the retained features of each sample: bool (batch, n_features), each False with probability p.

    The mask hashes key, place (layer and call) and feature number. It needs int32 arithmetic only, which
    wraps alike on every device.
    """
    features = torch.arange(n_features, dtype=torch.int32, device=keys.device)
    layer, call = place
    placed = _mix(_mix(keys ^ layer) ^ call)
    bits = _mix(placed[:, None] ^ _mix(features)[None, :])
    return bits >= _least_kept(p)


def _least_kept(p: float) -> int:
    """Return the smallest hash of a retained feature."""
    return round(p * 2**32) - 2**31


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return a bijection of 32-bit words in which each input bit changes every output bit (lowbias32)."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)
