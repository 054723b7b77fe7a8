"""Convolutions in other forms that compute the same to rounding (`conv_forms`), with weights as they are.

space_to_depth: a convolution with a stride and few channels is one without a stride on blocks of pixels,
stride by stride, whose channels lie one behind the other; its weights are padded with zeros to whole blocks.
dense: groups are one convolution, whose weights are zero between groups.
"""

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Config
from lockstep.network.working import operand

_MOST_CHANNELS = 4  # of pictures, for which libraries' strided convolutions are slow
_MOST_GROUPS = 4  # a dense form multiplies that many times as much


class Convolution(nn.Conv2d):
    """nn.Conv2d, with its weights as `operand` gives them. forms: 'space_to_depth', 'dense', both or none."""

    forms: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = operand(self, "weight"), operand(self, "bias")
        if "space_to_depth" in self.forms and _has_blocks(self):
            return _on_blocks(x, weight, bias, self.stride[0], _padding(self))
        if "dense" in self.forms and 1 < self.groups <= _MOST_GROUPS and self.padding_mode == "zeros":
            filled = _fill(weight, self.groups)
            return F.conv2d(x, filled, bias, self.stride, self.padding, self.dilation)
        plain: torch.Tensor = self._conv_forward(x, weight, bias)
        return plain


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


def _on_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: tuple[int, int]
) -> torch.Tensor:
    """x: (n, channel, row, column). weight: (out, channel, size, size). What F.conv2d makes of them."""
    size, (rows, columns) = weight.shape[2], x.shape[2:]
    blocks = -(-size // stride)  # of the window
    behind = []
    for length, pad in ((columns, padding[1]), (rows, padding[0])):
        n_out = (length + 2 * pad - size) // stride + 1
        # what no window reaches goes, below zero; what whole blocks need comes
        behind += [pad, stride * (n_out - 1 + blocks) - length - pad]
    x = F.pad(x, behind)
    missing = blocks * stride - size
    return F.conv2d(_stack(x, stride), _stack(F.pad(weight, (0, missing, 0, missing)), stride), bias)


def _stack(x: torch.Tensor, stride: int) -> torch.Tensor:
    """(n, channel, row, column) to (n, number in block, row of block, column of block), channels last."""
    n, channels, rows, columns = x.shape
    parts = x.permute(0, 2, 3, 1).reshape(n, rows // stride, stride, columns // stride, stride, channels)
    moved = parts.permute(0, 1, 3, 2, 4, 5).reshape(n, rows // stride, columns // stride, -1)
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
