"""Slots: where minibatches lie on their way from the files to the network, alike in every memory."""

from dataclasses import dataclass

import torch

_PAGE = 4096


@dataclass(frozen=True)
class Slot:
    """One minibatch, all of it in one contiguous piece of memory.

    labels, samples: int64 (batch,). crops: int32 (batch, 3), each image's row, column and whether to mirror
    it (0 or 1). images: (batch, row, column, 3) of the ring's dtype.
    """

    labels: torch.Tensor
    samples: torch.Tensor
    crops: torch.Tensor
    images: torch.Tensor


@dataclass(frozen=True)
class RingShape:
    """What both ends of a ring must agree on.

    A slot holds images of `image_size` (rows, columns): raw ones of the dataset in uint8, or what the network
    takes, `crop_size` square, in its dtype.
    """

    n_slots: int
    batch_size: int
    image_size: tuple[int, int]
    dtype: torch.dtype
    crop_size: int

    @property
    def crops_at(self) -> int:
        """From a slot's first byte to its crops, behind labels and samples."""
        return 2 * _whole_pages(8 * self.batch_size)

    @property
    def head_bytes(self) -> int:
        """From a slot's first byte to its images."""
        return self.crops_at + _whole_pages(12 * self.batch_size)

    @property
    def image_bytes(self) -> int:
        rows, columns = self.image_size
        return rows * columns * 3 * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        return _whole_pages(self.used_bytes(self.batch_size))

    @property
    def n_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    def used_bytes(self, n_images: int) -> int:
        """From a slot's first byte to the end of its first n_images images."""
        return self.head_bytes + n_images * self.image_bytes

    def slots(self, memory: torch.Tensor) -> list[Slot]:
        """The slots as views of `memory`, uint8 (n_bytes,)."""
        return [self._slot(memory[number * self.slot_bytes :]) for number in range(self.n_slots)]

    def _slot(self, memory: torch.Tensor) -> Slot:
        size = self.batch_size

        def view(start: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            n_bytes = torch.Size(shape).numel() * dtype.itemsize
            return memory[start : start + n_bytes].view(dtype).view(shape)

        return Slot(
            view(0, torch.int64, size),
            view(self.crops_at // 2, torch.int64, size),
            view(self.crops_at, torch.int32, size, 3),
            view(self.head_bytes, self.dtype, size, *self.image_size, 3),
        )


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE
