"""Gradients in 8 or 4 bits while they are merged; what that rounds off is carried to the next step.

Blocks of 256 have one scale each, as in 1-bit SGD's error feedback (Seide et al. 2014) with more bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

BLOCK = 256  # elements with one scale
Bits = Literal["int8", "int4"]
_LARGEST: dict[Bits, int] = {"int8": 127, "int4": 7}


@dataclass(frozen=True)
class Compression:
    """How a bucket's gradients become whole numbers, and tensors again. sizes: elements of each."""

    bits: Bits
    sizes: tuple[int, ...]

    @property
    def n_blocks(self) -> int:
        return -(-sum(self.sizes) // BLOCK)

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * (BLOCK if self.bits == "int8" else BLOCK // 2)

    def compress(self, *values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """values: the gradients, and what was carried, (n_blocks, BLOCK), which is replaced.

        Returns uint8 (n_bytes,) and scales (n_blocks,).
        """
        *gradients, carried = values
        flat = torch.cat([gradient.reshape(-1).to(carried.dtype) for gradient in gradients])
        carried.view(-1)[: len(flat)] += flat
        scales = carried.abs().amax(1) / _LARGEST[self.bits]
        whole = (carried / torch.where(scales == 0, 1, scales)[:, None]).round_()
        carried -= whole * scales[:, None]
        numbers = whole.to(torch.int8).view(-1)
        if self.bits == "int8":
            return numbers.view(torch.uint8), scales
        nibbles = (numbers + 8).view(torch.uint8)
        return nibbles[::2] | nibbles[1::2] << 4, scales

    def expand(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """(n_blocks * BLOCK,) of the scales' dtype."""
        if self.bits == "int8":
            whole = numbers.view(torch.int8)
        else:
            whole = torch.stack([numbers & 15, numbers >> 4], 1).view(-1).to(torch.int8) - 8
        return (whole.view(-1, BLOCK).to(scales.dtype) * scales[:, None]).view(-1)

    def add_up(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """values: of each device, numbers and scales. Returns the sums, flat, one for each gradient."""
        total = self.expand(values[0], values[1])
        for first in range(2, len(values), 2):
            total += self.expand(values[first], values[first + 1])
        parts: Sequence[torch.Tensor] = torch.split(total[: sum(self.sizes)], list(self.sizes))
        return tuple(part.clone() for part in parts)
