"""The ring of slots in which a loader hands minibatches to its trainer, in the trainer's device memory."""

from dataclasses import dataclass

import torch

from lockstep.memory import Block

_PAGE = 4096


@dataclass(frozen=True)
class Slot:
    """images: float32 (batch, row, column, channel); labels, samples: int64 (batch,)."""

    images: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor


@dataclass(frozen=True)
class RingShape:
    """What both ends must agree on."""

    n_slots: int
    batch_size: int
    crop_size: int

    @property
    def _part_bytes(self) -> tuple[int, int, int]:
        numbers = _whole_pages(8 * self.batch_size)
        return _whole_pages(4 * 3 * self.batch_size * self.crop_size**2), numbers, numbers

    @property
    def n_bytes(self) -> int:
        return self.n_slots * sum(self._part_bytes)

    def slots(self, block: Block) -> list[Slot]:
        """The slots as views of the ring's block."""
        image_bytes, label_bytes, slot_bytes = *self._part_bytes[:2], sum(self._part_bytes)
        found = []
        for start in range(0, self.n_bytes, slot_bytes):
            shape = (self.batch_size, self.crop_size, self.crop_size, 3)
            images = block.tensor(torch.float32, shape, start)
            labels = block.tensor(torch.int64, (self.batch_size,), start + image_bytes)
            samples = block.tensor(torch.int64, (self.batch_size,), start + image_bytes + label_bytes)
            found.append(Slot(images, labels, samples))
        return found


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE
