"""GPUs as devices of the dataflow engine: each lane has a stream for torch's kernels and ours."""

import contextlib
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.backends import devices as machine
from lockstep.errors import UserError
from lockstep.flow import private
from lockstep.flow.devices import Device, Event
from lockstep.kernels.fold import MOST_RANKS, ReduceKernel

_PROOF_NUMBERS = 4 << 20  # float32: 16 MiB each way


class _ForkState:
    """The process's use of CUDA, which does not survive a fork."""

    uses_cuda = False
    was_forked = False  # after its parent began to use CUDA, which then cannot work here


def _note_fork() -> None:
    _ForkState.was_forked = _ForkState.uses_cuda


os.register_at_fork(after_in_child=_note_fork)


def _check_process(name: str) -> None:
    if _ForkState.was_forked:
        raise UserError(
            f"{name} cannot be used in a forked process: its parent already uses CUDA. Start the process "
            "with multiprocessing's spawn method."
        )


# Streams that no lane uses now, by device. They are reused and never destroyed: torch's allocator records an
# event in a stream when memory that `record_stream` has named is freed, which may be after the lane's end.
_idle_streams: dict[str, list[Any]] = defaultdict(list)


def _take_stream(memory: Any) -> Any:
    """Return a stream that waits for the default stream, and it for this one: torch copies from it there."""
    with contextlib.suppress(IndexError):
        return _idle_streams[memory.device].pop()
    return memory.driver.Stream()


class _current(private.Scope):  # noqa: N801
    """A scope in which a device's context is this thread's current one.

    PyCUDA aborts the process if an interrupt leaves one behind.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def calls(self) -> tuple[list[Any], list[Any]]:
        return [self._context.push], [self._context.pop]


def _filled(memory: Any, numbers: np.ndarray) -> Any:
    """Return a new block of the device with these numbers."""
    with _current(memory.context):
        block = memory.allocate(numbers.nbytes, "proving peer access")
        memory.upload(block, numbers)
    return block


def _emptied(memory: Any, block: Any, like: np.ndarray) -> np.ndarray:
    """Return the block's numbers, and free it."""
    numbers = np.empty_like(like)
    with _current(memory.context):
        memory.driver.memcpy_dtoh(numbers, block.pointer)
        block.close()
    return numbers


def dense_parts(value: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the dense tensors of which a tensor consists: of a sparse one, its indices and values."""
    if value.layout is torch.sparse_coo:
        return value._indices(), value._values()
    return (value,) if value.layout is torch.strided else ()


class Cuda(Device):
    """A GPU. Each lane has a stream, in which torch computes; operations are done when they are launched."""

    asynchronous = True

    def __init__(self, number: int) -> None:
        from lockstep.memory.cuda import CudaMemory  # only machines with a GPU have PyCUDA

        self._number, self._peers = number, dict[Hashable, bool]()
        self.name, self.memory = f"cuda:{number}", f"cuda:{number}"
        self.workers = {"compute": 1, "communication": 1, "fetch": 1, "call": 1}
        self._memory = CudaMemory(self.name)
        if threading.current_thread() is not threading.main_thread():
            self._memory.context.pop()  # PyCUDA aborts the process if a thread leaves one behind
        self.torch_device = torch_device(self.name)
        self._context = threading.local()  # the stream, kernel and events of a worker
        _ForkState.uses_cuda = True

    def check_process(self) -> None:
        """Raise UserError in a forked process whose parent already used CUDA."""
        _check_process(self.name)

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        """Make the worker's stream, and let torch compute in it."""
        self._memory.context.push()
        stack.callback(self._memory.context.pop)
        self._context.stream = _take_stream(self._memory)
        self._context.kernel = None  # made with its first use
        self._context.events = _Events(self._memory, self._context.stream)
        self._context.torch_stream = None  # the tests' simulated devices are the CPU to torch
        stack.callback(self._leave)
        if machine.on_gpus([self.torch_device]):
            external: Any = torch.cuda.ExternalStream(self._context.stream.handle, self.torch_device)  # type: ignore[no-untyped-call]
            self._context.torch_stream = external
            stack.enter_context(torch.cuda.stream(external))

    def _leave(self) -> None:
        self._context.events.close()
        _idle_streams[self.name].append(self._context.stream)
        del self._context.events, self._context.kernel, self._context.stream, self._context.torch_stream

    def mark(self) -> "CudaEvent":
        """Return an event behind the operation just launched, in the worker's stream."""
        mark: CudaEvent = self._context.events.mark()
        return mark

    def follow(self, event: Event) -> None:
        """Let the worker's stream wait for another lane's event."""
        if isinstance(event, CudaEvent):
            raw = event.raw()
            if raw is not None:
                self._context.stream.wait_for_event(raw)
        else:
            event.synchronize()

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        """Tell torch's allocator that the worker's stream uses the memory of these values."""
        stream = self._context.torch_stream
        for value in values if stream is not None else ():
            for part in dense_parts(value):
                if part.is_cuda:  # memory of the host needs none
                    part.record_stream(stream)

    def reaches(self, other: Device, dtype: torch.dtype) -> bool:
        """Return whether kernels of this GPU can use the other's memory; the kernel takes float32 only."""
        return self.memory == other.memory or (dtype is torch.float32 and self.copies_from(other))

    def copies_from(self, other: Device) -> bool:
        """Return whether the GPUs use each other's memory, by what the driver says and a proof shows."""
        if self.memory == other.memory or not isinstance(other, Cuda):
            return self.memory == other.memory
        if other.memory not in self._peers:
            self._peers[other.memory] = self._open(other)
        return self._peers[other.memory]

    def _open(self, other: "Cuda") -> bool:
        driver, mine, theirs = self._memory.driver, self._memory.context, other._memory.context
        if not driver.Device(self._number).can_access_peer(driver.Device(other._number)):
            return False
        # A copy by torch tells its allocator, too, of which some settings need that for each peer.
        with private.without_modes():
            torch.zeros(1, device=self.torch_device).to(other.torch_device)
        try:
            with _current(mine):
                driver.Context.enable_peer_access(theirs)
        except driver.Error as error:
            if "already enabled" not in str(error):
                return False
        return self._averages_rightly(other)

    def _averages_rightly(self, other: "Cuda") -> bool:
        """Average random data of both GPUs into both, and return whether both have the mean's bits.

        Some machines garble or lose what crosses (lockstep/exchange/proof.py); then copies go by the host.
        """
        random = np.random.default_rng([self._number, other._number])
        values = random.random((2, _PROOF_NUMBERS), np.float32)
        memories = self._memory, other._memory
        blocks = [_filled(memory, numbers) for memory, numbers in zip(memories, values, strict=True)]
        with _current(self._memory.context):
            stream = _take_stream(self._memory)
            addresses = [block.pointer for block in blocks]
            kernel = ReduceKernel(self._memory, stream)  # kept until it has run: it has the compiled module
            try:
                kernel.launch(addresses, addresses, (0, _PROOF_NUMBERS), "mean")
            finally:  # after an interrupt, too: it uses the blocks
                stream.synchronize()
            _idle_streams[self.name].append(stream)
        mean = (values[0] + values[1]) / np.float32(2)
        found = [_emptied(memory, block, mean) for memory, block in zip(memories, blocks, strict=True)]
        return all(each.tobytes() == mean.tobytes() for each in found)

    def reduce(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Add up with the kernel of the trainers' exchange, in this lane's stream."""
        if sources[0].dtype is not torch.float32 or max(len(sources), len(targets)) > MOST_RANKS:
            super().reduce(sources, targets)
            return
        context = self._context
        if context.kernel is None:
            context.kernel = ReduceKernel(self._memory, context.stream)
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (sources, targets)]
        context.kernel.launch(*addresses, (0, sources[0].numel()), "sum")

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.torch_device, copy=True)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("cpu", copy=True)


class _Use(weakref.ref["CudaEvent"]):
    """A reference to a CudaEvent. When that is dropped, the event with this number is free."""

    __slots__ = ("number",)

    number: int


class _Events:
    """The events of one worker's stream. They are reused, and end in its thread, as PyCUDA requires."""

    def __init__(self, memory: Any, stream: Any) -> None:
        self.context, self._driver, self._stream = memory.context, memory.driver, stream
        self.made: list[Any] = []
        self._uses: list[Any] = []
        self._free = deque[_Use]()

    def mark(self) -> "CudaEvent":
        """Record and return an event behind the work that is in the stream now."""
        if self._free:
            number = self._free.pop().number
        else:
            number = len(self.made)
            self.made.append(self._driver.Event(self._driver.event_flags.DISABLE_TIMING))
            self._uses.append(None)
        self.made[number].record(self._stream)
        event = CudaEvent(self, number)
        # A C function: Python ignores what a handler of Ctrl-C raises in a finalizer.
        self._uses[number] = use = _Use(event, self._free.append)
        use.number = number
        return event

    def close(self) -> None:
        """Wait for the stream, and release all events."""
        self._stream.synchronize()
        self.made.clear()


class CudaEvent:
    """An event behind what is in a stream now. Any thread can wait for it."""

    def __init__(self, events: _Events, number: int) -> None:
        self._events, self._number = events, number

    def raw(self) -> Any:
        """Return PyCUDA's event, or None if its worker has ended, and so all its work."""
        try:
            return self._events.made[self._number]
        except IndexError:
            return None

    def synchronize(self) -> None:
        """Block until the stream has reached the event."""
        self._ask("synchronize")

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        return bool(self._ask("query"))

    def _ask(self, question: str) -> Any:
        event = self.raw()
        if event is None:
            return True
        with _torch_stays_on_its_device(), _current(self._events.context):
            return getattr(event, question)()


@contextlib.contextmanager
def _torch_stays_on_its_device() -> Iterator[None]:
    """Let torch's current device, which is that of the driver's context, be the same after the block."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if before is not None and torch.cuda.current_device() != before:
            torch.cuda.set_device(before)


def torch_device(name: str) -> torch.device:
    """Return torch's device. The tests replace this: their simulated devices are the CPU to torch."""
    return torch.device(name)


def cuda(number: int) -> Cuda:
    """Return GPU `number` as a device.

    Raises:
        UserError: The GPU does not exist or cannot be used; the message says why.
    """
    if not isinstance(number, int) or number < 0:
        raise UserError(f"flow.cuda: GPUs are counted from 0, so there is no {number!r}")
    _check_process(f"cuda:{number}")
    machine.check((f"cuda:{number}",), "flow.cpus(n) makes devices of the processor")
    if machine.on_gpus([torch_device(f"cuda:{number}")]):
        torch.cuda.init()  # type: ignore[no-untyped-call]
    with _torch_stays_on_its_device():
        return Cuda(number)
