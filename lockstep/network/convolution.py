"""Convolutions in other forms that compute the same to rounding (`conv_forms`), with weights as they are.

space_to_depth: a convolution with a stride and few channels is one without a stride on blocks of pixels,
stride by stride, whose channels lie one behind the other; its weights are padded with zeros to whole blocks.
Pictures may come in blocks already, from a GPU's kernel (blocks.py).
dense: groups are one convolution, whose weights are zero between groups.
"""

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Config
from lockstep.loading.slots import Blocks
from lockstep.network.working import operand

_MOST_CHANNELS = 4  # of pictures, for which libraries' strided convolutions are slow
_MOST_GROUPS = 4  # a dense form multiplies that many times as much


class Convolution(nn.Conv2d):
    """nn.Conv2d, with its weights as `operand` gives them. forms: 'space_to_depth', 'dense', both or none."""

    forms: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = operand(self, "weight"), operand(self, "bias")
        if self.takes_blocks():
            blocks = x if x.shape[1] != self.in_channels else self.stack(x)
            return F.conv2d(blocks, _stack_weight(weight, self.stride[0]), bias)
        if self.is_dense():
            filled = _fill(weight, self.groups)
            return F.conv2d(x, filled, bias, self.stride, self.padding, self.dilation)
        plain: torch.Tensor = self._conv_forward(x, weight, bias)
        return plain

    def takes_blocks(self) -> bool:
        """Whether it computes by space-to-depth, which is for it."""
        return "space_to_depth" in self.forms and _has_blocks(self)

    def is_dense(self) -> bool:
        """Whether it computes its groups as one convolution."""
        return "dense" in self.forms and 1 < self.groups <= _MOST_GROUPS and self.padding_mode == "zeros"

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Pictures (n, channel, row, column) in blocks: what no window reaches goes, below zero; what whole
        blocks need comes."""
        window, stride, behind = self.kernel_size[0], self.stride[0], []
        for length, pad in zip(reversed(x.shape[2:]), reversed(_padding(self)), strict=True):
            behind += [pad, stride * _count(length, window, stride, pad) - length - pad]
        return _stack(F.pad(x, behind), stride)

    def blocks_of(self, size: int) -> Blocks | None:
        """Those of pictures with `size` rows and columns; None where padding differs in both directions."""
        (pad, other), stride = _padding(self), self.stride[0]
        return Blocks(stride, pad, _count(size, self.kernel_size[0], stride, pad)) if pad == other else None


def install(model: nn.Module, config: Config) -> None:
    """Makes every nn.Conv2d of the model one of ours: the same module, with another way forward."""
    both = ("space_to_depth", "dense")
    forms = {"plain": (), "all": both}.get(config.conv_forms, (config.conv_forms,))
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Convolution
            module.forms = forms  # type: ignore[assignment]


def _has_blocks(layer: nn.Conv2d) -> bool:
    """Whether space-to-depth is for it: square, with a stride, of few channels."""
    square = len({*layer.kernel_size}) == len({*layer.stride}) == 1 and layer.dilation == (1, 1)
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    few = layer.in_channels <= _MOST_CHANNELS
    return square and plain and few and 1 < layer.stride[0] <= layer.kernel_size[0]


def _padding(layer: nn.Conv2d) -> tuple[int, int]:
    """Rows and columns of zeros on each side."""
    assert not isinstance(layer.padding, str)
    rows, columns = layer.padding
    return rows, columns


def _count(length: int, window: int, stride: int, pad: int) -> int:
    """Blocks in a direction that windows reach."""
    return (length + 2 * pad - window) // stride + -(-window // stride)


def _stack_weight(weight: torch.Tensor, stride: int) -> torch.Tensor:
    """weight: (out, channel, size, size), of which what is missing to whole blocks is zero."""
    missing = -weight.shape[2] % stride
    return _stack(F.pad(weight, (0, missing, 0, missing)), stride)


def _stack(x: torch.Tensor, stride: int) -> torch.Tensor:
    """(n, channel, row, column) to (n, number in block, row of block, column of block), channels last."""
    n, channels, rows, columns = x.shape
    parts = x.permute(0, 2, 3, 1).reshape(n, rows // stride, stride, columns // stride, stride, channels)
    shape = n, rows // stride, columns // stride, stride * stride * channels
    moved = parts.permute(0, 1, 3, 2, 4, 5).reshape(shape)
    return moved.permute(0, 3, 1, 2)


def _fill(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """(out, in / groups, row, column) to (out, in, row, column): each group's own inputs, zeros elsewhere."""
    inputs = weight.shape[1]
    parts = weight.chunk(groups)
    filled = [
        F.pad(part, (0, 0, 0, 0, inputs * number, inputs * (groups - 1 - number)))
        for number, part in enumerate(parts)
    ]
    return torch.cat(filled).contiguous(memory_format=torch.channels_last)
