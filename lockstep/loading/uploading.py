"""The second way into device memory (`upload: trainer`): the loader fills host memory, the trainer copies.

The ring lies twice: in a memory file, which the loader maps and the trainer has page-locked, and in the
device's memory. The loader needs no device, and nothing of CUDA is shared between processes. The trainer
copies in a stream of its own, as soon as it hears that a slot is full, beside what it computes; an event a
slot says that its copy is there (*filled*), another that its images have been made (*released*).

This file has run on the simulated driver of the tests only, not on a GPU yet.
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
    """beside: the stream in which it copies."""

    def __init__(
        self,
        memory: CudaMemory,
        stream: Any,
        shape: RingShape,
        ready: RingShape,
        mean: np.ndarray,
        beside: Any,
    ) -> None:
        super().__init__(memory, stream, shape, ready, mean)
        self._driver, self._beside = memory.driver, beside
        self._host = HostMemory().allocate(shape.n_bytes, "minibatches on their way to the device")
        pagelock(self._host)
        self._bytes = self._host.array(np.uint8, (shape.n_slots, shape.slot_bytes))
        self.filled = memory.events(shape.n_slots)

    def offer(self, pipe: Pipe) -> None:
        pipe.send(self.shape)
        self._host.send(pipe)

    def arrived(self, number: int, order: Order) -> None:
        used = self._bytes[number, : self.shape.used_bytes(order.last - order.first)]
        self._beside.wait_for_event(self.released[number])
        self._driver.memcpy_htod_async(
            self.block.pointer + number * self.shape.slot_bytes, used, self._beside
        )
        self.filled[number].record(self._beside)

    def release(self, number: int) -> None:
        """Its copy is over: the loader may write there again."""
        self.filled[number].synchronize()

    def let_go(self) -> None:
        self._beside.synchronize()
        self._stream.synchronize()

    def close(self) -> None:
        self.let_go()
        unlock(self._host)
        self._host.close()
        super().close()
