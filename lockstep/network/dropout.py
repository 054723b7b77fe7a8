"""Dropout whose masks are a function of (seed, epoch, sample, layer): the same for any number of trainers.

Models use plain `nn.Dropout`; `install` swaps it. Trainers see different samples, so their masks differ; a
sample's mask is the same whoever trains on it, on a CPU or a GPU, in a run that was resumed or not.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError


class SampleDropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014) with counter-based masks.

    keys: int32 (batch,), one a sample. kernel: makes and applies a mask in one launch on a GPU, where a
    trainer has set it.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.keys: torch.Tensor | None = None
        self.kernel: Any = None
        self.n_calls = 0  # in this step: a network may use one layer in several places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        assert self.keys is not None, "set_keys comes before forward"
        if len(x) % len(self.keys):
            raise UserError(
                f"the model's dropout layer {self.layer} gets {len(x)} rows for a batch of {len(self.keys)}: "
                "the first dimension must be the batch's, or each sample's parts one after another"
            )
        place = self.layer, self.n_calls
        self.n_calls += 1
        if self.kernel is not None and self.kernel.takes(x, self.keys):
            made: torch.Tensor = _InOneLaunch.apply(x, self, place)  # type: ignore[no-untyped-call]
            return made
        n_features = x.numel() // len(self.keys)
        keep = keep_mask(self.keys, place, n_features, self.p).view(x.shape)
        return x * keep.to(x.dtype).div_(1 - self.p)


class _InOneLaunch(torch.autograd.Function):
    """By the kernel; the gradient's mask is made again instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SampleDropout, place: tuple[int, int]) -> torch.Tensor:
        keys = layer.keys
        # What is kept is divided in the numbers' own precision, as in torch's way.
        factor = torch.ones((), dtype=x.dtype).div_(1 - layer.p).item()
        ctx.how = layer.kernel, keys, place, _least_kept(layer.p), factor
        return _apply(x, *ctx.how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _apply(gradient.contiguous(), *ctx.how), None, None


def _apply(x: torch.Tensor, kernel: Any, *how: Any) -> torch.Tensor:
    made: torch.Tensor = kernel.apply(x, *how)
    return made


def install(model: nn.Module) -> list[SampleDropout]:
    """Replaces every nn.Dropout in the model. Layers are numbered in the order of `modules()`."""
    installed: list[SampleDropout] = []
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Dropout:
                installed.append(SampleDropout(child.p, len(installed)))
                module._modules[name] = installed[-1]
    return installed


def set_keys(dropouts: list[SampleDropout], keys: torch.Tensor) -> None:
    """Tells the layers which samples come next: int32 (batch,), on the network's device."""
    for module in dropouts:
        module.keys, module.n_calls = keys, 0


def sample_keys(seed: int, epoch: int, n_samples: int) -> np.ndarray:
    """One key per sample of an epoch: int32 (n_samples,)."""
    random = generator(seed, epoch, Purpose.DROPOUT)
    return random.integers(-(2**31), 2**31, size=n_samples, dtype=np.int32)


def keep_mask(keys: torch.Tensor, place: tuple[int, int], n_features: int, p: float) -> torch.Tensor:
    """Which of a sample's features stay: bool (batch, n_features), each False with probability p.

    Hashes key, place (layer and call) and feature number. Needs only int32 arithmetic, which wraps alike on
    every device.
    """
    features = torch.arange(n_features, dtype=torch.int32, device=keys.device)
    layer, call = place
    placed = _mix(_mix(keys ^ layer) ^ call)
    bits = _mix(placed[:, None] ^ _mix(features)[None, :])
    return bits >= _least_kept(p)


def _least_kept(p: float) -> int:
    """The smallest hash of what stays."""
    return round(p * 2**32) - 2**31


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words in which each input bit moves each output bit (Wellons' lowbias32)."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)
