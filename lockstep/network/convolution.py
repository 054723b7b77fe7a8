"""Convolutions in other forms with the same weights and, up to rounding, the same results (`conv_layout`).

- `space_to_depth`: a strided convolution of few channels becomes one without a stride on blocks of
  stride x stride pixels, whose values are channels. Its weights are padded with zeros to whole blocks. A
  GPU's augmentation kernel can write images in blocks at once (lockstep/kernels/augment.cu); `blocks_for`
  decides.
- `dense`: grouped convolutions become one convolution whose weights are zero between groups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Config
from lockstep.loading.slots import BlockLayout
from lockstep.network.low_precision import OperandLayer, operand

_MOST_CHANNELS = 4  # libraries' strided convolutions are slow for images, which have few channels
_MOST_GROUPS = 4  # the dense form takes this many times the multiplications
_SIZES = (2, 4)  # block sizes that augment.cu writes
_BOUND = 1e-2  # relative to the largest output: tf32 products have 10-bit mantissas


class Convolution(nn.Conv2d, OperandLayer):
    """An nn.Conv2d in one of the other forms, with its weights in the precision of `operand`.

    Attributes:
        forms: 'space_to_depth', 'dense', both or none.
    """

    forms: tuple[str, ...] = ()

    def forward(self, input: torch.Tensor, adds_bias: bool = True) -> torch.Tensor:
        """Return the convolution; without its bias where the next layer adds it (see ReluMaxPool.behind)."""
        weight, bias = operand(self, "weight"), operand(self, "bias") if adds_bias else None
        if self.takes_blocks():
            blocks = input if input.shape[1] != self.in_channels else self.stack(input)
            return F.conv2d(blocks, _stack_weight(weight, self.stride[0]), bias)
        if self.is_dense():
            filled = _fill(weight, self.groups)
            return F.conv2d(input, filled, bias, self.stride, self.padding, self.dilation)
        plain: torch.Tensor = self._conv_forward(input, weight, bias)
        return plain

    def takes_blocks(self) -> bool:
        """Return whether this layer computes by space-to-depth."""
        return "space_to_depth" in self.forms and _has_blocks(self)

    def is_dense(self) -> bool:
        """Return whether this layer computes its groups as one convolution."""
        return "dense" in self.forms and 1 < self.groups <= _MOST_GROUPS and self.padding_mode == "zeros"

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Return images (n, channel, row, column) in blocks.

        Pixels that no window reaches are cut off; missing pixels of whole blocks are zero.
        """
        window, stride, behind = self.kernel_size[0], self.stride[0], []
        for length, pad in zip(reversed(x.shape[2:]), reversed(_padding(self)), strict=True):
            behind += [pad, stride * _count(length, window, stride, pad) - length - pad]
        return _stack(F.pad(x, behind), stride)

    def blocks_of(self, size: int) -> BlockLayout | None:
        """Return the blocks of images with `size` rows and columns, or None where the two paddings differ."""
        (pad, other), stride = _padding(self), self.stride[0]
        if pad != other:
            return None
        return BlockLayout(stride, pad, _count(size, self.kernel_size[0], stride, pad))


def install(model: nn.Module, config: Config) -> None:
    """Make every nn.Conv2d of the model a `Convolution`, in place."""
    both, layout = ("space_to_depth", "dense"), layout_of(config)
    forms = {"plain": (), "all": both}.get(layout, (layout,))
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Convolution
            module.forms = forms  # type: ignore[assignment]


def layout_of(config: Config) -> str:
    """Return `conv_layout`; `auto` is resolved to what was faster (docs/results/gpu.md), `all` or `plain`."""
    if config.conv_layout != "auto":
        return config.conv_layout
    on_gpu = any(device.startswith("cuda") for device in config.devices)
    return "all" if on_gpu and config.precision == "bf16" else "plain"


def _has_blocks(layer: nn.Conv2d) -> bool:
    """Return whether space-to-depth applies: square, with a stride, of few channels."""
    square = len({*layer.kernel_size}) == len({*layer.stride}) == 1 and layer.dilation == (1, 1)
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    few = layer.in_channels <= _MOST_CHANNELS
    return square and plain and few and 1 < layer.stride[0] <= layer.kernel_size[0]


def _padding(layer: nn.Conv2d) -> tuple[int, int]:
    """Return the rows and columns of zeros on each side."""
    assert not isinstance(layer.padding, str)
    rows, columns = layer.padding
    return rows, columns


def _count(length: int, window: int, stride: int, pad: int) -> int:
    """Return the number of blocks that windows reach in one direction."""
    return (length + 2 * pad - window) // stride + -(-window // stride)


def _stack_weight(weight: torch.Tensor, stride: int) -> torch.Tensor:
    """Return a weight (out, channel, size, size) in blocks, padded with zeros to whole blocks."""
    missing = -weight.shape[2] % stride
    return _stack(F.pad(weight, (0, missing, 0, missing)), stride)


def _stack(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Return (n, channel, row, column) as (n, value in block, block row, block column), channels last."""
    n, channels, rows, columns = x.shape
    parts = x.permute(0, 2, 3, 1).reshape(n, rows // stride, stride, columns // stride, stride, channels)
    shape = n, rows // stride, columns // stride, stride * stride * channels
    moved = parts.permute(0, 1, 3, 2, 4, 5).reshape(shape)
    return moved.permute(0, 3, 1, 2)


def _fill(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return (out, in / groups, row, column) as (out, in, row, column), zero outside each group's inputs."""
    inputs = weight.shape[1]
    parts = weight.chunk(groups)
    filled = [
        F.pad(part, (0, 0, 0, 0, inputs * number, inputs * (groups - 1 - number)))
        for number, part in enumerate(parts)
    ]
    return torch.cat(filled).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def blocks_for(model: nn.Module, size: int, like: torch.Tensor) -> tuple[BlockLayout | None, str]:
    """Find out whether the model accepts images of `size` rows and columns in blocks.

    The check runs two images. Exactly one convolution by space-to-depth must receive the images unchanged,
    and the outputs for their blocks must be the same.

    Args:
        like: A tensor of the images' dtype and device.

    Returns:
        The blocks, or None and the reason.
    """
    training, random = model.training, torch.Generator().manual_seed(0)
    images = torch.randn((2, 3, size, size), generator=random).to(like)
    model.eval()
    try:
        expected, layers = _outputs(model, images)
        if len(layers) != 1:
            return None, "no single convolution by space-to-depth takes the images as they come"
        blocks = layers[0].blocks_of(size)
        if blocks is None or blocks.size not in _SIZES:
            sizes = " or ".join(map(str, _SIZES))
            return None, f"the kernel makes blocks of {sizes} pixels, padded alike in both directions"
        try:
            outputs = model(layers[0].stack(images))
        except Exception:  # the user's code may do anything with the images
            outputs = torch.full_like(expected, torch.nan)
        if not (outputs - expected).abs().max() <= _BOUND * expected.abs().max():
            return None, "the network does more with its images than convolve them"
        return blocks, ""
    finally:
        model.train(training)


def _outputs(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, list[Convolution]]:
    """Return the model's outputs, and the space-to-depth convolutions that received the images themselves."""
    layers: list[Convolution] = []

    def look(layer: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0] is images:
            layers.append(layer)

    able = [each for each in model.modules() if isinstance(each, Convolution) and each.takes_blocks()]
    handles = [layer.register_forward_pre_hook(look) for layer in able]
    outputs: torch.Tensor = model(images)
    for handle in handles:
        handle.remove()
    return outputs, layers
