"""Devices: what has memory and lanes. A CPU can be split into several; a GPU is one.

Another kind of device is a class with the contract of `Device` (docs/extending.md has one).
"""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.backends import devices as machine
from lockstep.errors import UserError
from lockstep.memory.malloc import share_one_heap

if TYPE_CHECKING:
    from lockstep.flow.engine import Engine

_THREADS = threading.Lock()


class Event(Protocol):
    """A point in what one lane of an asynchronous device does."""

    def synchronize(self) -> None:
        """Returns when the lane has come to it."""

    def query(self) -> bool:
        """Whether the lane has come to it."""


class Device(ABC):
    """The contract of a device: memory, lanes, how a value gets in and out, how an operation is run.

    name: for people. memory: devices with an equal one share their values without a copy. torch_device: what
    tensors there say. workers: how many each of its lanes has; more than one makes the order in which its
    operations run depend on timing, never their results.
    """

    name: str
    memory: Hashable
    torch_device: torch.device
    workers: Mapping[str, int]
    engine: "Engine | None" = None
    asynchronous = False  # whether operations are launched, and run later

    def lane_for(self, kind: str) -> str:
        """The lane that does a kind of work: compute, communication, fetch or call."""
        return kind

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        """Called in each worker of a lane before its first operation; what it puts on the stack ends it."""
        return

    def settle(self) -> None:
        """Called in the worker behind each operation: returns when any lane can use its results."""
        return

    def launch(self, function: Callable[[], Any]) -> Any:
        """Runs an operation in the worker; where the device is asynchronous, this returns before it has."""
        return function()

    def mark(self) -> "Event | None":
        """Called in the worker behind each operation: what tells when it has run; None if it has."""
        self.settle()
        return None

    def follow(self, event: "Event") -> None:
        """Called in the worker: what is launched next runs behind another lane's event."""
        event.synchronize()

    def call(self, function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Runs one torch operation on values of this device."""
        return function(*arguments, **keywords)

    @abstractmethod
    def put(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in this device's memory of a value in ordinary memory or in another device's."""

    @abstractmethod
    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in ordinary memory of a value in this device's."""

    def __repr__(self) -> str:
        return self.name


class Cpu(Device):
    """Some of the cores. A worker computes, with its own intra-op threads; one copies; one is for calls.

    cores: numbers of the processors that its workers may run on. threads: of torch in each operation.
    """

    memory = "host"
    torch_device = torch.device("cpu")

    def __init__(self, name: str, cores: frozenset[int], threads: int, workers: int = 1) -> None:
        self.name, self.cores, self.threads = name, cores, threads
        self.workers = {"compute": workers, "communication": 1, "call": 1}

    def lane_for(self, kind: str) -> str:
        return "communication" if kind == "fetch" else kind

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        os.sched_setaffinity(0, self.cores)  # of this thread, and of those that torch starts from it
        set_own_threads(self.threads)

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("cpu", copy=True)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()


class Cuda(Device):
    """A GPU. Each lane has a stream, in which torch computes; operations are done when they are launched."""

    asynchronous = True

    def __init__(self, number: int, workers: int = 1) -> None:
        from lockstep.memory.cuda import CudaMemory  # PyCUDA is there on machines with a GPU only

        self.name, self.memory = f"cuda:{number}", f"cuda:{number}"
        self.workers = {"compute": workers, "communication": 1, "fetch": 1, "call": 1}
        self._memory = CudaMemory(self.name)
        self.torch_device = torch_device(self.name)
        self._here = threading.local()

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        self._memory.context.push()
        stack.callback(self._memory.context.pop)
        self._here.stream = self._memory.driver.Stream()
        self._here.events = _Events(self._memory, self._here.stream)
        stack.callback(self._leave)
        if machine.on_gpus([self.torch_device]):
            external: Any = torch.cuda.ExternalStream(self._here.stream.handle, self.torch_device)  # type: ignore[no-untyped-call]
            stack.enter_context(torch.cuda.stream(external))

    def _leave(self) -> None:
        self._here.events.close()
        del self._here.events, self._here.stream

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

    def call(self, function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if machine.on_gpus([self.torch_device]):
            for value in arguments:  # its memory must not be used again before this stream has read it
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    value.record_stream(torch.cuda.current_stream(self.torch_device))
        return function(*arguments, **keywords)

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


def cpus(n: int, threads: int | None = None, workers: int = 1) -> list[Cpu]:
    """The cores that this process may use, split into n devices; with fewer cores than n, they share them.

    threads: of each device's operations (default: one a core). workers: that compute, on each device; see
    docs/decisions.md for why it is one. Raises UserError for less than one of any.
    """
    for value, what in ((n, "n, the number of devices,"), (threads, "threads"), (workers, "workers")):
        if value is not None and value < 1:
            raise UserError(f"flow.cpus: {what} is 1 or more, not {value}")
    share_one_heap()
    cores = sorted(os.sched_getaffinity(0))[: machine.count_cores()]
    made = []
    for number in range(n):
        first, stop = number * len(cores) // n, (number + 1) * len(cores) // n
        own = cores[first : max(stop, first + 1)]
        made.append(Cpu(f"cpu:{number}" if n > 1 else "cpu", frozenset(own), threads or len(own), workers))
    return made


def cuda(number: int, workers: int = 1) -> Cuda:
    """GPU `number`. Raises UserError, which says why, where it is not there or can't be used."""
    machine.check((f"cuda:{number}",))
    return Cuda(number, workers)


def set_own_threads(number: int) -> None:
    """Sets torch's intra-op threads for the calling thread and leaves everybody else's as they are.

    torch.set_num_threads also sets what threads get that have not computed yet, so that is put back; and in a
    new thread it is undone by the first operation unless get_num_threads came before.
    """
    with _THREADS:
        others = _in_new_thread(torch.get_num_threads)
        _set_threads(number)
        _in_new_thread(partial(_set_threads, others))


def _set_threads(number: int) -> None:
    torch.get_num_threads()
    torch.set_num_threads(number)


def _in_new_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
