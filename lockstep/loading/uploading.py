"""A ring that the trainer copies to the device itself (`upload: trainer`).

The ring exists twice: in a memory file, which the loader maps and the trainer has page-locked, and in device
memory. The loader needs no device, and processes share nothing of CUDA. The trainer copies in a second stream
while it computes, as soon as a slot is full. Each slot has two events: *filled* after its copy, *released*
after its images have been made.
"""

from typing import Any

import numpy as np

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.loading.cuda import RawRing
from lockstep.loading.slots import RingShape
from lockstep.memory.cuda import CudaMemory
from lockstep.memory.host import HostMemory
from lockstep.memory.pagelock import pagelock, unlock


class UploadRing(RawRing):
    """A ring in host memory with a copy in device memory.

    Args:
        copy_stream: The stream of the copies.
    """

    def __init__(
        self,
        memory: CudaMemory,
        stream: Any,
        shape: RingShape,
        ready: RingShape,
        mean: np.ndarray,
        copy_stream: Any,
    ) -> None:
        super().__init__(memory, stream, shape, ready, mean)
        self._driver, self._copy_stream = memory.driver, copy_stream
        self._host = HostMemory().allocate(shape.n_bytes, "minibatches on their way to the device")
        pagelock(self._host)
        self._bytes = self._host.array(np.uint8, (shape.n_slots, shape.slot_bytes))
        self._raw_slots = shape.slots(self._bytes.reshape(-1))
        self.filled = memory.events(shape.n_slots)

    def connect(self, pipe: Pipe) -> None:
        pipe.send(self.shape)
        self._host.send(pipe)

    def on_filled(self, number: int, order: Order) -> None:
        n_images = self._raw_slots[number].n_images(order.last - order.first)
        used = self._bytes[number, : self.shape.used_bytes(n_images)]
        self._copy_stream.wait_for_event(self.released[number])
        self._driver.memcpy_htod_async(
            self.block.pointer + number * self.shape.slot_bytes, used, self._copy_stream
        )
        self.filled[number].record(self._copy_stream)

    def release(self, number: int) -> None:
        """Wait until the copy is over, so that the loader may write to the slot again."""
        self.filled[number].synchronize()

    def disconnect(self) -> None:
        self._copy_stream.synchronize()
        self._stream.synchronize()

    def close(self) -> None:
        self.disconnect()
        unlock(self._host)
        self._host.close()
        super().close()
