"""A ring in host memory, in which the loader augments images or leaves that to the trainer's GPU."""

import numpy as np

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.data.augment import Augmenter
from lockstep.loading import Batch, Filler, Ring, batch_of
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape
from lockstep.memory.host import HostBlock, HostMemory


class HostRing(Ring):
    """A ring of float32 images as the network takes them."""

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self.block = HostMemory().allocate(shape.n_bytes, "minibatches")
        self._slots = shape.tensors(self.block.array(np.uint8, (shape.n_bytes,)))

    def connect(self, pipe: Pipe) -> None:
        pipe.send(self.shape)
        self.block.send(pipe)

    def acquire(self, number: int) -> None:
        """No-op: the slot is full when `Filled` arrives."""

    def batch(self, number: int, order: Order) -> Batch:
        return batch_of(order, self._slots[number])

    def release(self, number: int) -> None:
        """No-op: CPU work is synchronous."""

    def close(self) -> None:
        self.block.close()


class HostFiller(Filler):
    """A filler that augments on the CPU. A slot is full when `fill` returns.

    Args:
        block: The ring's memory, opened in this process.
    """

    def __init__(self, reader: Reader, block: HostBlock, shape: RingShape) -> None:
        self._reader, self._block = reader, block
        self._slots = shape.slots(block.array(np.uint8, (shape.n_bytes,)))
        raw = reader.raw_shape(n_slots=1)
        self._raw = raw.slots(np.zeros(raw.n_bytes, np.uint8))[0]
        self._augmenter = Augmenter(reader.mean, shape.crop_size)

    def fill(self, number: int, order: Order) -> None:
        n_samples, raw, slot = order.last - order.first, self._raw, self._slots[number]
        self._reader.read(order, raw)
        shifts = raw.shifts[:n_samples] if self._reader.shifts_colours else None
        self._augmenter.apply(raw.images[:n_samples], raw.crops[:n_samples], slot.images[:n_samples], shifts)
        for name in ("labels", "samples", "other_labels", "label_weights"):
            getattr(slot, name)[:n_samples] = getattr(raw, name)[:n_samples]

    def close(self) -> None:
        self._block.close()


class RawHostFiller(Filler):
    """A filler of raw slots, for a ring whose trainer copies to its device (uploading.py)."""

    def __init__(self, reader: Reader, block: HostBlock, shape: RingShape) -> None:
        self._reader, self._block = reader, block
        self._slots = shape.slots(block.array(np.uint8, (shape.n_bytes,)))

    def fill(self, number: int, order: Order) -> None:
        self._reader.read(order, self._slots[number])

    def close(self) -> None:
        self._block.close()
