"""A ring in host memory: the loader crops, mirrors and subtracts the mean into the trainer's slots, or leaves
that to the trainer's device."""

import numpy as np

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.data.augment import Augmenter
from lockstep.loading import Batch, Filler, Ring, batch_of
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape
from lockstep.memory.host import HostBlock, HostMemory


class HostRing(Ring):
    """Its slots hold float32 images as the network takes them."""

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self.block = HostMemory().allocate(shape.n_bytes, "minibatches")
        self._slots = shape.tensors(self.block.array(np.uint8, (shape.n_bytes,)))

    def offer(self, pipe: Pipe) -> None:
        pipe.send(self.shape)
        self.block.send(pipe)

    def await_filled(self, number: int) -> None:
        """It is there when `Filled` comes."""

    def batch(self, number: int, order: Order) -> Batch:
        return batch_of(order, self._slots[number])

    def release(self, number: int) -> None:
        """A processor has done what it was told when the next line is reached."""

    def close(self) -> None:
        self.block.close()


class HostFiller(Filler):
    """`block`: the ring's memory, opened here. It is in place when `fill` returns."""

    def __init__(self, reader: Reader, block: HostBlock, shape: RingShape) -> None:
        self._reader, self._block = reader, block
        self._slots = shape.slots(block.array(np.uint8, (shape.n_bytes,)))
        raw = reader.raw_shape(n_slots=1)
        self._raw = raw.slots(np.zeros(raw.n_bytes, np.uint8))[0]
        self._augmenter = Augmenter(reader.dataset.mean, shape.crop_size)
        self._shifts_colours = reader.shifts_colours

    def fill(self, number: int, order: Order) -> None:
        n_samples, raw, slot = order.last - order.first, self._raw, self._slots[number]
        self._reader.read(order, raw)
        shifts = raw.shifts[:n_samples] if self._shifts_colours else None
        self._augmenter.apply(raw.images[:n_samples], raw.crops[:n_samples], slot.images[:n_samples], shifts)
        slot.labels[:n_samples] = raw.labels[:n_samples]
        slot.samples[:n_samples] = raw.samples[:n_samples]

    def close(self) -> None:
        self._block.close()


class RawHostFiller(Filler):
    """Of a ring whose trainer copies to its device (uploading.py): as HostFiller, but slots are raw."""

    def __init__(self, reader: Reader, block: HostBlock, shape: RingShape) -> None:
        self._reader, self._block = reader, block
        self._slots = shape.slots(block.array(np.uint8, (shape.n_bytes,)))

    def fill(self, number: int, order: Order) -> None:
        self._reader.read(order, self._slots[number])

    def close(self) -> None:
        self._block.close()
