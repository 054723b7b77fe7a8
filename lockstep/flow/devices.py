"""Devices: memory and lanes. A CPU can be split into several devices; a GPU is one (gpu.py).

Another kind of device is a subclass of `Device`; docs/extending.md has an example.
"""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from lockstep.errors import UserError
from lockstep.exchange.reduction import reduce_arrays
from lockstep.flow import private
from lockstep.memory.malloc import share_one_heap
from lockstep.threads import MOST_THREADS, prepare_square_roots

LANES = ("compute", "communication", "fetch", "call")  # the kinds of work that may be pushed
_THREADS = threading.Lock()
os.register_at_fork(after_in_child=_THREADS._at_fork_reinit)  # type: ignore[attr-defined]
prepare_square_roots()  # before any worker exists


class Event(Protocol):
    """A point in the work of one lane of an asynchronous device."""

    def synchronize(self) -> None:
        """Block until the lane has reached it."""

    def query(self) -> bool:
        """Return whether the lane has reached it."""


class Device(ABC):
    """The interface of a device: memory, lanes, transfers of values, and how an operation runs.

    Attributes:
        name: Shown to users.
        memory: Devices with equal memories share values without a copy.
        torch_device: The device of tensors in this memory.
        workers: The number of workers of each lane. With more than one, the order in which operations run
            depends on timing; their results never do.
        asynchronous: Whether operations are launched, and run later.
        engine: The open engine that has the device, or None.
    """

    name: str
    memory: Hashable
    torch_device: torch.device
    workers: Mapping[str, int]
    engine: Any = None
    asynchronous = False

    def __copy__(self) -> "Device":
        """Return the device itself: it has the only workers of its lanes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Device":
        """Return the device itself: the copy of a module that has it uses the same one."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: the workers belong to this process."""
        raise UserError("a device can't be pickled: make one in the process that loads the object")

    def lane_for(self, kind: str) -> str:
        """Return the lane for a kind of work: compute, communication, fetch or call."""
        return kind

    def check_process(self) -> None:
        """Raise UserError if this process cannot use the device. An engine calls it first."""
        return

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        """Prepare a worker of a lane; when the worker ends, the stack undoes it."""
        return

    def launch(self, function: Callable[[], Any]) -> Any:
        """Run an operation in the worker. An asynchronous device returns before it has run."""
        return function()

    def mark(self) -> "Event | None":
        """Return an event behind the operation just launched, or None if its results are ready at once."""
        return None

    def follow(self, event: "Event") -> None:
        """Let what the worker launches next run behind another lane's event."""
        event.synchronize()

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        """Keep the memory of these values from being reused before the next operation has run."""
        return

    def call(self, function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Run one torch operation on values of this device."""
        return function(*arguments, **keywords)

    def reaches(self, other: "Device", dtype: torch.dtype) -> bool:
        """Return whether `reduce` on this device can use values in the other's memory without a copy."""
        return self.memory == other.memory

    def copies_from(self, other: "Device") -> bool:
        """Return whether values come from the other's memory without a copy in the host's between."""
        return self.memory == other.memory

    def reduce(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Write the sum of contiguous tensors, in their order, into the targets, which may be among them."""
        total = sources[0]
        for source in sources[1:]:
            total = total + source
        for target in targets:
            target.copy_(total)

    @abstractmethod
    def put(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a value, from host memory or another device's, in this device's memory."""

    @abstractmethod
    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a value of this device in host memory."""

    def __repr__(self) -> str:
        return self.name


class Cpu(Device):
    """Some of the cores, with one lane that computes, one that copies and one for calls.

    Args:
        cores: Numbers of the processors that its workers may run on.
        threads: torch's intra-op threads in each operation.
        workers: Workers of the compute lane.
    """

    memory = "host"
    torch_device = torch.device("cpu")

    def __init__(self, name: str, cores: frozenset[int], threads: int, workers: int = 1) -> None:
        self.name, self.cores, self.threads = name, cores, threads
        self.workers = {"compute": workers, "communication": 1, "call": 1}

    def lane_for(self, kind: str) -> str:
        """Return the lane for a kind of work: values are fetched on the lane for communication."""
        return "communication" if kind == "fetch" else kind

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        """Bind the worker to the device's cores, and limit its intra-op threads."""
        os.sched_setaffinity(0, self.cores)  # of this thread, and of those that torch starts from it
        set_own_threads(self.threads)

    def reduce(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if sources[0].dtype not in (torch.float32, torch.float64):
            super().reduce(sources, targets)
            return
        arrays = {id(tensor): tensor.view(-1).numpy() for tensor in (*sources, *targets)}
        reduce_arrays([arrays[id(t)] for t in sources], [arrays[id(t)] for t in targets], "sum")

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("cpu", copy=True)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()


def cpus(n: int, threads: int | None = None, workers: int = 1) -> list[Cpu]:
    """Split the cores that this process may use into n devices; with fewer cores than n, they share them.

    Args:
        threads: Intra-op threads of each device's operations (default: one per core).
        workers: Workers that compute, on each device. docs/decisions/flow.md says why it is one.

    Raises:
        UserError: An argument is less than 1, or more than a machine has threads for.
    """
    numbers = [(n, "n, the number of devices,"), (workers, "workers")]
    for value, what in numbers if threads is None else [*numbers, (threads, "threads")]:
        if not isinstance(value, int) or value < 1:
            raise UserError(f"flow.cpus: {what} is 1 or more, not {value}")
        if value > MOST_THREADS:
            raise UserError(f"flow.cpus: {what} is at most {MOST_THREADS}, not {value}")
    share_one_heap()
    torch.get_num_threads()  # a caller that has not computed yet could get the number that a worker sets
    cores = sorted(os.sched_getaffinity(0))
    made = []
    for number in range(n):
        first, stop = number * len(cores) // n, (number + 1) * len(cores) // n
        own = cores[first : max(stop, first + 1)]
        made.append(Cpu(f"cpu:{number}" if n > 1 else "cpu", frozenset(own), threads or len(own), workers))
    return made


def set_own_threads(number: int) -> None:
    """Set torch's intra-op threads for the calling thread only.

    torch.set_num_threads also changes the default of threads that have not computed yet, so that is
    restored. In a new thread the first operation would undo it unless get_num_threads was called before.
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
    pause, resume = private.pausing()  # a finalizer in the new thread might wait for the worker that is here
    private.call_all(pause)
    try:
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        thread.join()
    finally:
        private.call_all(resume)
    return results[0]
