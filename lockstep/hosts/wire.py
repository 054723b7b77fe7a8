"""How numbers look on their way between hosts: fewer bits than they are computed with.

bfloat16 rounds to the nearest. int8 has one scale for each block of numbers, and rounds up or down at random
with the mean right (Gupta et al. 2015, arXiv 1502.02551; QSGD, Alistarh et al. 2017, arXiv 1610.02132).
"""

from abc import ABC, abstractmethod

import torch

BLOCK = 256  # numbers that share a scale
_LARGEST = 127


class Wire(ABC):
    """Numbers as bytes and back. bits: of a number, its part of a scale included."""

    bits: float

    @abstractmethod
    def n_bytes(self, n_elements: int) -> int:
        """Of so many numbers, a multiple of BLOCK."""

    @abstractmethod
    def pack(self, values: torch.Tensor, packed: torch.Tensor, generator: torch.Generator) -> None:
        """values: (n,), n a multiple of BLOCK. packed: uint8, (n_bytes(n),), is written."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """What `pack` has made, as floating-point numbers, (n,). What was not finite is not finite."""


class BFloat16(Wire):
    bits = 16

    def n_bytes(self, n_elements: int) -> int:
        return 2 * n_elements

    def pack(self, values: torch.Tensor, packed: torch.Tensor, generator: torch.Generator) -> None:
        packed.view(torch.bfloat16).copy_(values)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.view(torch.bfloat16)


class Int8(Wire):
    """First all numbers, then all scales."""

    bits = 8 + 32 / BLOCK

    def n_bytes(self, n_elements: int) -> int:
        return n_elements + 4 * (n_elements // BLOCK)

    def pack(self, values: torch.Tensor, packed: torch.Tensor, generator: torch.Generator) -> None:
        blocks = values.float().view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / _LARGEST  # not a number where one of the block is not
        chance = torch.rand(blocks.shape, generator=generator, device=blocks.device)
        steps = torch.nan_to_num(blocks / scales) + chance  # a block of zeros has a scale of 0
        packed[: len(values)].view(torch.int8).copy_(steps.floor_().clamp_(-_LARGEST, _LARGEST).view(-1))
        packed[len(values) :].view(torch.float32).copy_(scales.view(-1))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        n_elements = len(packed) * BLOCK // (BLOCK + 4)
        numbers = packed[:n_elements].view(torch.int8).view(-1, BLOCK)
        scales = packed[n_elements:].view(torch.float32).view(-1, 1)
        return (numbers * scales).view(-1)
