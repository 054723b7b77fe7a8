"""Slots: where minibatches lie on their way from the files to the network, alike in every memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:  # a loader for CPUs has no need of torch
    import torch

Array = TypeVar("Array")
Dtype = Literal["uint8", "float32", "bfloat16"]

_PAGE = 4096
_ITEM_BYTES = {"uint8": 1, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Blocks:
    """How a first convolution takes pictures by space-to-depth (lockstep/network/convolution.py).

    Blocks of `size` x `size` pixels, whose numbers are channels: (row in the block, column in the block, 3).
    `count` of them each way, from `padding` rows and columns before the picture on. What of them lies outside
    of the picture is zero; what of the picture lies behind them is left out.
    """

    size: int
    padding: int
    count: int


@dataclass(frozen=True)
class Slot(Generic[Array]):
    """One minibatch, all of it in one contiguous piece of memory, as arrays of NumPy or tensors.

    labels, samples: int64 (batch,). crops: int32 (batch, 3), each image's row, column and whether to mirror
    it (0 or 1). shifts: float32 (batch, 3), what is added to its red, green and blue. images: (batch, row,
    column, channel) of the ring's dtype.
    """

    labels: Array
    samples: Array
    crops: Array
    shifts: Array
    images: Array


@dataclass(frozen=True)
class RingShape:
    """What both ends of a ring must agree on.

    A slot holds images of `image_size` (rows, columns): raw ones of the dataset in uint8, or what the network
    takes, `crop_size` square, in its dtype, or these in `blocks`, of which `image_size` is the count then.
    """

    n_slots: int
    batch_size: int
    image_size: tuple[int, int]
    dtype: Dtype
    crop_size: int
    blocks: Blocks | None = None

    @property
    def n_channels(self) -> int:
        return 3 * self.blocks.size**2 if self.blocks else 3

    @property
    def crops_at(self) -> int:
        """From a slot's first byte to its crops, behind labels and samples."""
        return 2 * _whole_pages(8 * self.batch_size)

    @property
    def shifts_at(self) -> int:
        """From a slot's first byte to its shifts."""
        return self.crops_at + _whole_pages(12 * self.batch_size)

    @property
    def head_bytes(self) -> int:
        """From a slot's first byte to its images."""
        return self.shifts_at + _whole_pages(12 * self.batch_size)

    @property
    def image_bytes(self) -> int:
        rows, columns = self.image_size
        return rows * columns * self.n_channels * _ITEM_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        return _whole_pages(self.used_bytes(self.batch_size))

    @property
    def n_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    def used_bytes(self, n_images: int) -> int:
        """From a slot's first byte to the end of its first n_images images."""
        return self.head_bytes + n_images * self.image_bytes

    def slots(self, memory: np.ndarray) -> list[Slot[np.ndarray]]:
        """The slots as views of `memory`, uint8 (n_bytes,). NumPy has no bfloat16."""
        return self._slots(lambda start, dtype, shape: np.ndarray(shape, dtype, memory, start))

    def tensors(self, memory: "torch.Tensor | np.ndarray") -> "list[Slot[torch.Tensor]]":
        """The slots as tensors on `memory`, uint8 (n_bytes,), which may be a device's."""
        import torch

        flat = torch.as_tensor(memory)

        def view(start: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            dtype = getattr(torch, name)
            return flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return self._slots(view)

    def _slots(self, view: Callable[[int, str, tuple[int, ...]], Any]) -> list[Slot[Any]]:
        size = self.batch_size
        return [
            Slot(
                view(first, "int64", (size,)),
                view(first + self.crops_at // 2, "int64", (size,)),
                view(first + self.crops_at, "int32", (size, 3)),
                view(first + self.shifts_at, "float32", (size, 3)),
                view(first + self.head_bytes, self.dtype, (size, *self.image_size, self.n_channels)),
            )
            for first in range(0, self.n_bytes, self.slot_bytes)
        ]


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE
