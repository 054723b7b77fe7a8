"""GPUs as devices of the dataflow engine: each lane has a stream, in which torch and our kernels compute.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from lockstep.backends import devices as machine
from lockstep.errors import UserError
from lockstep.exchange.p2p import MOST_RANKS, FoldKernel
from lockstep.flow.devices import Device, Event


class Cuda(Device):
    """A GPU. Each lane has a stream, in which torch computes; operations are done when they are launched."""

    asynchronous = True

    def __init__(self, number: int, workers: int = 1) -> None:
        from lockstep.memory.cuda import CudaMemory  # PyCUDA is there on machines with a GPU only

        self._number, self._peers = number, dict[Hashable, bool]()
        self.name, self.memory = f"cuda:{number}", f"cuda:{number}"
        self.workers = {"compute": workers, "communication": 1, "fetch": 1, "call": 1}
        self._memory = CudaMemory(self.name)
        self.torch_device = torch_device(self.name)
        self._here = threading.local()

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        self._memory.context.push()
        stack.callback(self._memory.context.pop)
        self._here.stream = self._memory.driver.Stream()
        self._here.fold = None  # made with its first use
        self._here.events = _Events(self._memory, self._here.stream)
        stack.callback(self._leave)
        if machine.on_gpus([self.torch_device]):
            external: Any = torch.cuda.ExternalStream(self._here.stream.handle, self.torch_device)  # type: ignore[no-untyped-call]
            stack.enter_context(torch.cuda.stream(external))

    def _leave(self) -> None:
        self._here.events.close()
        del self._here.events, self._here.fold, self._here.stream

    def mark(self) -> "CudaEvent":
        mark: CudaEvent = self._here.events.mark()
        return mark

    def follow(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            raw = event.raw()
            if raw is not None:
                self._here.stream.wait_for_event(raw)
        else:
            event.synchronize()

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        if machine.on_gpus([self.torch_device]):
            for value in values:
                if value.layout is torch.strided:
                    value.record_stream(torch.cuda.current_stream(self.torch_device))

    def reaches(self, other: Device, dtype: torch.dtype) -> bool:
        """Also the memory of GPUs that the driver lets this one read and write; the kernel takes float32."""
        if self.memory == other.memory or not isinstance(other, Cuda) or dtype is not torch.float32:
            return self.memory == other.memory
        if other.memory not in self._peers:
            self._peers[other.memory] = self._open(other)
        return self._peers[other.memory]

    def _open(self, other: "Cuda") -> bool:
        driver, mine, theirs = self._memory.driver, self._memory.context, other._memory.context
        if not driver.Device(self._number).can_access_peer(driver.Device(other._number)):
            return False
        mine.push()
        try:
            driver.Context.enable_peer_access(theirs)
        except driver.Error as error:
            return "already enabled" in str(error)
        finally:
            mine.pop()
        return True

    def fold(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """By the kernel of the trainers' exchange, in this lane's stream."""
        if sources[0].dtype is not torch.float32 or max(len(sources), len(targets)) > MOST_RANKS:
            super().fold(sources, targets)
            return
        here = self._here
        if here.fold is None:
            here.fold = FoldKernel(self._memory, here.stream)
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (sources, targets)]
        here.fold.launch(*addresses, (0, sources[0].numel()), "sum")

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.torch_device, copy=True)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("cpu", copy=True)


class _Events:
    """Those of one worker's stream. They are used again, and end in its thread, as PyCUDA asks for."""

    def __init__(self, memory: Any, stream: Any) -> None:
        self.context, self._driver, self._stream = memory.context, memory.driver, stream
        self.made: list[Any] = []
        self.free: deque[int] = deque()

    def mark(self) -> "CudaEvent":
        if not self.free:
            self.free.append(len(self.made))
            self.made.append(self._driver.Event(self._driver.event_flags.DISABLE_TIMING))
        number = self.free.pop()
        self.made[number].record(self._stream)
        return CudaEvent(self, number)

    def close(self) -> None:
        self._stream.synchronize()
        self.made.clear()


class CudaEvent:
    """An event behind what is in a stream now. Any thread can wait for it."""

    def __init__(self, events: _Events, number: int) -> None:
        self._events, self._number = events, number

    def __del__(self) -> None:
        self._events.free.append(self._number)

    def raw(self) -> Any:
        """PyCUDA's; None when its worker has ended, and so all that it had to do."""
        made = self._events.made
        return made[self._number] if made else None

    def synchronize(self) -> None:
        self._ask("synchronize")

    def query(self) -> bool:
        return bool(self._ask("query"))

    def _ask(self, question: str) -> Any:
        event = self.raw()
        if event is None:
            return True
        self._events.context.push()
        try:
            return getattr(event, question)()
        finally:
            self._events.context.pop()


def torch_device(name: str) -> torch.device:
    """What torch calls it. The tests' simulated devices are the processor to torch."""
    return torch.device(name)


def cuda(number: int, workers: int = 1) -> Cuda:
    """GPU `number`. Raises UserError, which says why, where it is not there or can't be used."""
    if number < 0:
        raise UserError(f"flow.cuda: GPUs are counted from 0, so there is no {number}")
    machine.check((f"cuda:{number}",), "flow.cpus(n) makes devices of the processor")
    return Cuda(number, workers)
