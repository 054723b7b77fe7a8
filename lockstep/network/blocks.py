"""Whether a network can be given its pictures in blocks, as its first convolution takes them.

Then a GPU's kernel that crops them writes them so (lockstep/kernels/augment.cu), and no pass rearranges them.
"""

from typing import Any

import torch
from torch import nn

from lockstep.loading.slots import Blocks
from lockstep.network.convolution import Convolution

_SIZES = (2, 4)  # of blocks that augment.cu makes
_BOUND = 1e-2  # of the largest answer: products in tf32 have 10 bits
_COLOURS = 3


@torch.no_grad()
def blocks_for(model: nn.Module, size: int, like: torch.Tensor) -> tuple[Blocks | None, str]:
    """How the model is to be given pictures of `size` rows and columns, or None and why not, in words.

    Tried out with two of them: one convolution by space-to-depth must be given the pictures as they are, and
    the answers to their blocks must be the same. like: a tensor of the pictures' dtype and device.
    """
    training, random = model.training, torch.Generator().manual_seed(0)
    pictures = torch.randn((2, _COLOURS, size, size), generator=random).to(like)
    model.eval()
    try:
        expected, layers = _answers(model, pictures)
        if len(layers) != 1:
            return None, "no single convolution by space-to-depth takes the pictures as they come"
        blocks = layers[0].blocks_of(size)
        if blocks is None or blocks.size not in _SIZES:
            return (
                None,
                f"the kernel makes blocks of {_SIZES[0]} or {_SIZES[1]} pixels, padded alike in both ways",
            )
        try:
            found = model(layers[0].stack(pictures))
        except Exception:  # it is the user's code, which may do anything with the pictures
            found = torch.full_like(expected, torch.nan)
        if not (found - expected).abs().max() <= _BOUND * expected.abs().max():
            return None, "the network does more with its pictures than convolve them"
        return blocks, ""
    finally:
        model.train(training)


def _answers(model: nn.Module, pictures: torch.Tensor) -> tuple[torch.Tensor, list[Convolution]]:
    """The model's, and the convolutions by space-to-depth that were given the pictures themselves."""
    layers: list[Convolution] = []

    def look(layer: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0] is pictures:
            layers.append(layer)

    able = [each for each in model.modules() if isinstance(each, Convolution) and each.takes_blocks()]
    handles = [layer.register_forward_pre_hook(look) for layer in able]
    answers: torch.Tensor = model(pictures)
    for handle in handles:
        handle.remove()
    return answers, layers
