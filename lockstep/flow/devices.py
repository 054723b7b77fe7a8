"""Devices: what has memory and lanes. A CPU can be split into several; a GPU is one (gpu.py).

Another kind of device is a class with the contract of `Device` (docs/extending.md has one).
"""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.backends import devices as machine
from lockstep.errors import UserError
from lockstep.exchange.fold import fold_all
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

    def launch(self, function: Callable[[], Any]) -> Any:
        """Runs an operation in the worker; where the device is asynchronous, this returns before it has."""
        return function()

    def mark(self) -> "Event | None":
        """Called in the worker behind each operation: what tells when any lane can use its results;

        None if any can.
        """
        return None

    def follow(self, event: "Event") -> None:
        """Called in the worker: what is launched next runs behind another lane's event."""
        event.synchronize()

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        """Called before each operation: their memory must not be used again before it has run."""
        return

    def call(self, function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Runs one torch operation on values of this device."""
        return function(*arguments, **keywords)

    def reaches(self, other: "Device", dtype: torch.dtype) -> bool:
        """Whether `fold` here can use values in the other's memory as they are."""
        return self.memory == other.memory

    def fold(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Writes the sum of contiguous tensors, in their order, into others, which may be some of them."""
        total = sources[0]
        for source in sources[1:]:
            total = total + source
        for target in targets:
            target.copy_(total)

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

    def fold(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if sources[0].dtype not in (torch.float32, torch.float64):
            super().fold(sources, targets)
            return
        arrays = {id(tensor): tensor.view(-1).numpy() for tensor in (*sources, *targets)}
        fold_all([arrays[id(t)] for t in sources], [arrays[id(t)] for t in targets], "sum")

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("cpu", copy=True)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()


def cpus(n: int, threads: int | None = None, workers: int = 1) -> list[Cpu]:
    """The cores that this process may use, split into n devices; with fewer cores than n, they share them.

    threads: of each device's operations (default: one a core). workers: that compute, on each device; see
    docs/decisions.md for why it is one. Raises UserError for less than one of any.
    """
    for value, what in ((n, "n, the number of devices,"), (threads, "threads"), (workers, "workers")):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"flow.cpus: {what} is 1 or more, not {value}")
    share_one_heap()
    cores = sorted(os.sched_getaffinity(0))[: machine.count_cores()]
    made = []
    for number in range(n):
        first, stop = number * len(cores) // n, (number + 1) * len(cores) // n
        own = cores[first : max(stop, first + 1)]
        made.append(Cpu(f"cpu:{number}" if n > 1 else "cpu", frozenset(own), threads or len(own), workers))
    return made


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
