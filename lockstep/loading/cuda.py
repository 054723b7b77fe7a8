"""A ring in device memory: files are read into page-locked memory and copied by DMA into the trainer's slots.

No host waits for a device, except a loader for page-locked memory to be free again. Each slot has two
interprocess events: the loader records *filled* after its copy, the trainer records *released* after its last
use. A wait refers to the last record issued before it; the messages `Filled` and `Fill` order the calls.
Before the first minibatch the loader writes known bytes, which the trainer checks, so that a system where
sharing does not work is reported at once.

Crop, mirror, mean and conversion are one kernel, which also writes images in blocks for networks that take
them so. Other kernels make the changes before it that some keys ask for. They run in the trainer between two
steps (RawRing, RawFiller), or in the loader beside the steps (ReadyRing, AugmentingFiller), if the device can
run both at once.
"""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.kernels.augment import CropMirrorSubtractKernel
from lockstep.loading import Batch, Filler, Ring, batch_of
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape
from lockstep.memory.cuda import CudaBlock, CudaMemory

_PROBE_BYTES = 4096  # slots of either shape have as many


def probe_bytes(shape: RingShape) -> np.ndarray:
    """Return the known bytes that a loader writes first, uint8 (n,)."""
    n_bytes = min(_PROBE_BYTES, shape.slot_bytes)
    return np.random.default_rng(n_bytes).integers(0, 256, n_bytes, np.uint8)


class CudaRing(Ring):
    """The common part of rings in device memory.

    Args:
        stream: The stream in which the trainer computes.
    """

    def __init__(self, memory: CudaMemory, stream: Any, shape: RingShape) -> None:
        self.shape = shape
        self._memory, self._stream = memory, stream
        self.block = memory.allocate(shape.n_bytes, "minibatches")
        self.released = memory.events(shape.n_slots)
        self.filled: list[Any] = []  # events of the filler

    def connect(self, pipe: Pipe) -> None:
        self.released = self._memory.shared_events(self.shape.n_slots)
        pipe.send(self.shape)
        self.block.send(pipe)
        self._memory.send_events(pipe, self.released)
        self.filled = self._memory.receive_events(pipe, "its events")
        self._check_probe()

    def _check_probe(self) -> None:
        """Raise a UserError unless the loader's known bytes have arrived when its event says so."""
        expected = probe_bytes(self.shape)
        actual = np.empty_like(expected)
        self._stream.wait_for_event(self.filled[0])
        self._memory.driver.memcpy_dtoh_async(actual, self.block.pointer, self._stream)
        self._stream.synchronize()
        n_wrong = int((actual != expected).sum())
        if n_wrong:
            raise UserError(
                f"{self._memory}: of {len(expected):,} bytes that the loader has copied there, {n_wrong:,} "
                "are wrong in the trainer: CUDA IPC does not work here. Set upload: trainer."
            )

    def acquire(self, number: int) -> None:
        self._stream.wait_for_event(self.filled[number])

    def release(self, number: int) -> None:
        self.released[number].record(self._stream)

    def disconnect(self) -> None:
        self._stream.synchronize()
        self.filled = []

    def close(self) -> None:
        self._stream.synchronize()
        self.block.close()


class RawRing(CudaRing):
    """A ring of raw images. `batch` makes the network's images from a slot, always at the same address."""

    def __init__(
        self, memory: CudaMemory, stream: Any, shape: RingShape, ready: RingShape, mean: np.ndarray
    ) -> None:
        super().__init__(memory, stream, shape)
        self._ready = memory.allocate(ready.n_bytes, "the minibatch in use")
        self._slot = ready.tensors(self._ready.tensor(torch.uint8, (ready.n_bytes,)))[0]
        self._kernel = CropMirrorSubtractKernel(memory, stream, mean, shape, ready)

    def batch(self, number: int, order: Order) -> Batch:
        raw = self.block.pointer + number * self.shape.slot_bytes
        self._kernel.launch(raw, self._ready.pointer, order.last - order.first)
        self.released[number].record(self._stream)  # nothing else needs the raw slot
        return batch_of(order, self._slot)

    def release(self, number: int) -> None:
        """No-op: `batch` has recorded the event already, since nothing else needs the raw slot."""

    def close(self) -> None:
        super().close()
        self._kernel.close()
        self._ready.close()


class ReadyRing(CudaRing):
    """A ring of images as the network takes them."""

    def __init__(self, memory: CudaMemory, stream: Any, shape: RingShape) -> None:
        super().__init__(memory, stream, shape)
        self._slots = shape.tensors(self.block.tensor(torch.uint8, (shape.n_bytes,)))

    def batch(self, number: int, order: Order) -> Batch:
        return batch_of(order, self._slots[number])


class CudaFiller(Filler):
    """The common part of fillers of device memory.

    Args:
        stream: The stream of the copies.
        block: The ring's memory.
        released: The ring's events.
        filled: This filler's events, one for each slot.
    """

    def __init__(
        self,
        memory: CudaMemory,
        stream: Any,
        reader: Reader,
        shape: RingShape,
        block: CudaBlock,
        released: list[Any],
        filled: list[Any],
    ) -> None:
        self._driver, self._stream, self._reader = memory.driver, stream, reader
        self._shape, self._block, self._released = shape, block, released
        self.filled = filled
        self._raw = reader.raw_shape(shape.n_slots)
        self._pinned = memory.pinned(self._raw.n_bytes).reshape(shape.n_slots, -1)
        self._slots = self._raw.slots(self._pinned.reshape(-1))

    def fill(self, number: int, order: Order) -> None:
        self.filled[number].synchronize()  # the last copy out of the page-locked memory, a whole ring ago
        self._reader.read(order, self._slots[number])
        address = self._block.pointer + number * self._shape.slot_bytes
        self._transfer(number, address, order.last - order.first)
        self.filled[number].record(self._stream)

    def write_probe(self) -> None:
        """Write bytes that the trainer knows into the first slot."""
        expected = probe_bytes(self._shape)
        self._pinned.reshape(-1)[: len(expected)] = expected
        used = self._pinned.reshape(-1)[: len(expected)]
        self._driver.memcpy_htod_async(self._block.pointer, used, self._stream)
        self.filled[0].record(self._stream)

    def close(self) -> None:
        self._stream.synchronize()
        self._released = []  # before the trainer destroys them
        self._block.close()

    @abstractmethod
    def _transfer(self, number: int, address: int, n_samples: int) -> None:
        """Issue all work that brings a raw slot from page-locked memory to a slot's device address."""

    def _copy(self, number: int, address: int, n_samples: int) -> None:
        n_images = self._slots[number].n_images(n_samples)
        used = self._pinned[number, : self._raw.used_bytes(n_images)]
        self._driver.memcpy_htod_async(address, used, self._stream)


class RawFiller(CudaFiller):
    """A filler that copies raw images, which needs none of the device's multiprocessors."""

    def _transfer(self, number: int, address: int, n_samples: int) -> None:
        self._stream.wait_for_event(self._released[number])
        self._copy(number, address, n_samples)


class AugmentingFiller(CudaFiller):
    """A filler that copies into a staging buffer, from which the kernel writes into the ring."""

    def __init__(self, memory: CudaMemory, stream: Any, reader: Reader, shape: RingShape, *ring: Any) -> None:
        super().__init__(memory, stream, reader, shape, *ring)
        self._staging = memory.allocate(self._raw.slot_bytes, "raw images")
        self._kernel = CropMirrorSubtractKernel(memory, stream, reader.mean, self._raw, shape)

    def _transfer(self, number: int, address: int, n_samples: int) -> None:
        self._copy(number, self._staging.pointer, n_samples)
        self._stream.wait_for_event(self._released[number])
        self._kernel.launch(self._staging.pointer, address, n_samples)

    def close(self) -> None:
        super().close()
        self._kernel.close()
        self._staging.close()
