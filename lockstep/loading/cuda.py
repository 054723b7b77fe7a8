"""A ring in device memory: from the file through page-locked memory, by DMA, into the trainer's slots.

No host waits for a device, but a loader for page-locked memory to be free again. Two interprocess events a
slot say what the device has done: *filled*, recorded by the loader behind its copy, and *released*, recorded
by the trainer behind its last use. A wait refers to the last record that was issued before it; the messages
`Filled` and `Fill` see to the order of the calls. Before the first minibatch the loader writes known bytes,
and the trainer looks whether they have come: where sharing does not work, that is said at once.

Crop, mirror, mean and conversion are one kernel, which lays pictures in blocks where the network takes them
so. It runs in the trainer (RawRing, RawFiller), between two steps, or in the loader (ReadyRing,
AugmentingFiller), beside them, if the device can run both at once.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from lockstep import kernels
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.loading import Batch, Filler, Ring, batch_of
from lockstep.loading.reader import Reader
from lockstep.loading.slots import Blocks, RingShape
from lockstep.memory.cuda import CudaBlock, CudaMemory

_THREADS = 256
_PROOF_BYTES = 4096  # a slot has as many, of either shape
_MOST_IMAGES = 65_535  # rows of a grid


def proof_bytes(shape: RingShape) -> np.ndarray:
    """What a loader writes first, uint8 (n,)."""
    n_bytes = min(_PROOF_BYTES, shape.slot_bytes)
    return np.random.default_rng(n_bytes).integers(0, 256, n_bytes, np.uint8)


class AugmentKernel:
    """From a raw slot to a slot as the network takes it, both in this device's memory."""

    def __init__(
        self, memory: CudaMemory, stream: Any, mean: np.ndarray, raw: RingShape, out: RingShape
    ) -> None:
        if raw.batch_size > _MOST_IMAGES:
            raise UserError(
                f"batch_size: a GPU trainer takes {_MOST_IMAGES:,} at most, not {raw.batch_size:,}"
            )
        self._driver, self._stream, self._raw, self._out = memory.driver, stream, raw, out
        self._kernel = kernels.load(memory.driver, "augment").get_function(f"augment_{out.dtype}")
        self._mean = memory.allocate(mean.nbytes, "the mean image")
        memory.upload(self._mean, mean)

    def launch(self, raw: int, out: int, n_images: int) -> None:
        """raw, out: addresses of slots. Copies labels and sample numbers, makes the first n_images images."""
        self._driver.memcpy_dtod_async(out, raw, self._raw.head_bytes, self._stream)
        if not n_images:
            return
        height, width = self._raw.image_size
        blocks = self._out.blocks or Blocks(1, 0, self._out.crop_size)
        self._kernel(
            np.uint64(raw + self._raw.head_bytes),
            np.uint64(raw + self._raw.crops_at),
            np.uint64(raw + self._raw.shifts_at),
            np.uint64(self._mean.pointer),
            np.uint64(out + self._out.head_bytes),
            *map(np.int32, (height, width, self._out.crop_size, blocks.size, blocks.padding)),
            block=(_THREADS, 1, 1),
            grid=(blocks.count, n_images),
            stream=self._stream,
        )

    def close(self) -> None:
        self._mean.close()


class CudaRing(Ring):
    """What both kinds of rings share. stream: in which the trainer computes."""

    def __init__(self, memory: CudaMemory, stream: Any, shape: RingShape) -> None:
        self.shape = shape
        self._memory, self._stream = memory, stream
        self.block = memory.allocate(shape.n_bytes, "minibatches")
        self.released = memory.events(shape.n_slots)
        self.filled: list[Any] = []  # the filler's

    def offer(self, pipe: Pipe) -> None:
        self.released = self._memory.shared_events(self.shape.n_slots)
        pipe.send(self.shape)
        self.block.send(pipe)
        self._memory.send_events(pipe, self.released)
        self.filled = self._memory.receive_events(pipe, "its events")
        self._check_proof()

    def _check_proof(self) -> None:
        """Raises UserError where what the loader has written is not there when its event says so."""
        expected = proof_bytes(self.shape)
        found = np.empty_like(expected)
        self._stream.wait_for_event(self.filled[0])
        self._memory.driver.memcpy_dtoh_async(found, self.block.pointer, self._stream)
        self._stream.synchronize()
        n_wrong = int((found != expected).sum())
        if n_wrong:
            raise UserError(
                f"{self._memory}: of {len(expected):,} bytes that the loader has copied there, {n_wrong:,} "
                "are wrong in the trainer: CUDA IPC does not work here; upload: trainer does without it"
            )

    def await_filled(self, number: int) -> None:
        self._stream.wait_for_event(self.filled[number])

    def release(self, number: int) -> None:
        self.released[number].record(self._stream)

    def let_go(self) -> None:
        self._stream.synchronize()
        self.filled = []

    def close(self) -> None:
        self._stream.synchronize()
        self.block.close()


class RawRing(CudaRing):
    """Slots of raw images. Using one makes the network's images of it, always in the same place."""

    def __init__(
        self, memory: CudaMemory, stream: Any, shape: RingShape, ready: RingShape, mean: np.ndarray
    ) -> None:
        super().__init__(memory, stream, shape)
        self._ready = memory.allocate(ready.n_bytes, "the minibatch in use")
        self._slot = ready.tensors(self._ready.tensor(torch.uint8, (ready.n_bytes,)))[0]
        self._kernel = AugmentKernel(memory, stream, mean, shape, ready)

    def batch(self, number: int, order: Order) -> Batch:
        raw = self.block.pointer + number * self.shape.slot_bytes
        self._kernel.launch(raw, self._ready.pointer, order.last - order.first)
        self.released[number].record(self._stream)  # nothing else needs the raw slot
        return batch_of(order, self._slot)

    def release(self, number: int) -> None:
        """Done: its images have been made when they are used."""

    def close(self) -> None:
        super().close()
        self._kernel.close()
        self._ready.close()


class ReadyRing(CudaRing):
    """Slots of images as the network takes them."""

    def __init__(self, memory: CudaMemory, stream: Any, shape: RingShape) -> None:
        super().__init__(memory, stream, shape)
        self._slots = shape.tensors(self.block.tensor(torch.uint8, (shape.n_bytes,)))

    def batch(self, number: int, order: Order) -> Batch:
        return batch_of(order, self._slots[number])


class CudaFiller(Filler):
    """What both kinds of fillers share.

    stream: for the copies. block, released: the ring's memory and events. filled: this filler's events, one a
    slot.
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
        self._bring(number, address, order.last - order.first)
        self.filled[number].record(self._stream)

    def prove(self) -> None:
        """Writes bytes that the trainer knows into the first slot."""
        expected = proof_bytes(self._shape)
        self._pinned.reshape(-1)[: len(expected)] = expected
        used = self._pinned.reshape(-1)[: len(expected)]
        self._driver.memcpy_htod_async(self._block.pointer, used, self._stream)
        self.filled[0].record(self._stream)

    def close(self) -> None:
        self._stream.synchronize()
        self._released = []  # before the trainer destroys them
        self._block.close()

    @abstractmethod
    def _bring(self, number: int, address: int, n_images: int) -> None:
        """Issues everything that brings a raw slot of the page-locked memory into the ring's slot."""

    def _copy(self, number: int, address: int, n_images: int) -> None:
        used = self._pinned[number, : self._raw.used_bytes(n_images)]
        self._driver.memcpy_htod_async(address, used, self._stream)


class RawFiller(CudaFiller):
    """Copies: nothing of it needs the device's processors."""

    def _bring(self, number: int, address: int, n_images: int) -> None:
        self._stream.wait_for_event(self._released[number])
        self._copy(number, address, n_images)


class AugmentingFiller(CudaFiller):
    """Copies into memory of its own, and has the kernel write into the ring."""

    def __init__(self, memory: CudaMemory, stream: Any, reader: Reader, shape: RingShape, *ring: Any) -> None:
        super().__init__(memory, stream, reader, shape, *ring)
        self._staging = memory.allocate(self._raw.slot_bytes, "raw images")
        self._kernel = AugmentKernel(memory, stream, reader.dataset.mean, self._raw, shape)

    def _bring(self, number: int, address: int, n_images: int) -> None:
        self._copy(number, self._staging.pointer, n_images)
        self._stream.wait_for_event(self._released[number])
        self._kernel.launch(self._staging.pointer, address, n_images)

    def close(self) -> None:
        super().close()
        self._kernel.close()
        self._staging.close()
