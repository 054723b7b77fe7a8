"""Device memory that processes share by CUDA IPC: PyCUDA allocates and opens it, torch computes on it.

CUDA's rules for cuIpcGetMemHandle and cuIpcOpenMemHandle shape this file:
- A handle refers to a whole allocation. So every block is a separate `cuMemAlloc`, never a piece of torch's
  cache.
- A process cannot open its own handles, and an importer must close before the owner frees.
- Allocations are multiples of 2 MiB, CUDA's granularity; otherwise other data in the last unit would be
  exported too.
- Memory is shared through the driver only, but an interprocess event is a file in /dev/shm (leftovers.py).
  So interprocess events exist only where something is shared.
- All calls use the device's primary context, which torch uses too; another context could not share with it.
"""

import atexit
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.comm.pipes import Pipe
from lockstep.errors import BATCH_KEYS, UserError
from lockstep.memory import Block, Memory
from lockstep.memory.host import HostBlock
from lockstep.memory.pagelock import pagelock

if TYPE_CHECKING:
    import torch

GRANULE = 2 << 20  # bytes
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: never waits for the default stream
_REMEDY = (
    "CUDA IPC needs one /dev/shm that all processes of a run can write to, on a system that has it (gVisor "
    "has not): run them in one container with --shm-size, or with --ipc=host; upload: trainer or "
    "para_load: false, with one trainer or with exchange: staged, do without it (docs/install.md)"
)


@dataclass(frozen=True)
class CudaHandle:
    """The message that shares a block: its IPC handle, its requested size, and the owner's device."""

    ipc: bytes
    n_bytes: int
    pci_bus_id: str


@dataclass(frozen=True)
class EventHandles:
    """The message that shares interprocess events."""

    ipc: tuple[bytes, ...]


class _Bytes:
    """A block in the CUDA array interface, version 3, for torch. Tensors on it keep it alive."""

    def __init__(self, block: "CudaBlock") -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "shape": (block.n_bytes,),
            "typestr": "|u1",
            "data": (block.pointer, False),
            "version": 3,
        }


def as_bytes(block: "CudaBlock", device: str) -> "torch.Tensor":
    """Return a block as a uint8 tensor (n_bytes,), without a copy."""
    import torch

    return torch.as_tensor(_Bytes(block), device=device)


class CudaBlock(Block):
    """An allocation of this process, or one of another process that is open here.

    Args:
        memory: The device's allocator.
        allocation: PyCUDA's DeviceAllocation, which has `free`, or IPCMemoryHandle, which has `close`.
        n_bytes: Requested size.
        pci_bus_id: The device that has the memory.
        owned: Whether this process has allocated it.
    """

    def __init__(
        self, memory: "CudaMemory", allocation: Any, n_bytes: int, pci_bus_id: str, owned: bool
    ) -> None:
        self.n_bytes, self.pci_bus_id = n_bytes, pci_bus_id
        self._memory, self._allocation, self._owned = memory, allocation, owned

    @property
    def pointer(self) -> int:
        """The device address."""
        assert self._allocation is not None, "the block is closed"
        return int(self._allocation)

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int = 0) -> "torch.Tensor":
        raw = as_bytes(self, self._memory.device)
        n_bytes = math.prod(shape) * dtype.itemsize
        assert offset + n_bytes <= self.n_bytes, "the view does not fit into the block"
        return raw[offset : offset + n_bytes].view(dtype).view(shape)

    def send(self, pipe: Pipe) -> None:
        assert self._owned, "only its owner can share a block"
        pipe.send(self.handle())

    def handle(self) -> CudaHandle:
        """Return the handle with which another process opens this block.

        Raises:
            UserError: Processes cannot share memory on this system.
        """
        with self._memory.sharing("memory"):
            ipc = bytes(self._memory.driver.mem_get_ipc_handle(self._allocation))
        return CudaHandle(ipc, self.n_bytes, self.pci_bus_id)

    def close(self) -> None:
        """Free or close the block. No stream and no importer may use it any more."""
        if self._allocation is None:
            return
        if self._owned:
            self._allocation.free()
        else:
            self._allocation.close()
        self._allocation = None


class CudaMemory(Memory):
    """The allocator of 'cuda:<n>'.

    The device's primary context stays current in the thread that constructs this until the process ends,
    because PyCUDA's objects need it when they are dropped.

    Attributes:
        driver: The module pycuda.driver.
        device: 'cuda:<n>'.
        pci_bus_id: Names the device independently of a process's numbering.

    Raises:
        UserError: PyCUDA cannot be imported, or the device cannot be used.
    """

    def __init__(self, device: str) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            reason = f"{device} needs PyCUDA, which can't be imported ({error})"
            remedy = "install it, or, if it is installed, a driver as new as the CUDA it was built with"
            raise UserError(f"{reason}: {remedy} (docs/install.md)") from error
        self.driver, self.device = driver, device
        try:
            driver.init()
            card = driver.Device(int(device.removeprefix("cuda:")))
            self.context = card.retain_primary_context()
        except driver.Error as error:
            raise UserError(f"{device} can't be used: {error}; see python -m lockstep.doctor") from error
        self.name, self.pci_bus_id = card.name(), card.pci_bus_id()
        self.context.push()
        if threading.current_thread() is threading.main_thread():
            atexit.register(self.context.pop)

    def __str__(self) -> str:
        return f"{self.device} ({self.name}, {self.pci_bus_id})"

    def allocate(self, n_bytes: int, what: str) -> CudaBlock:
        assert n_bytes > 0
        try:
            allocation = self.driver.mem_alloc(-(-n_bytes // GRANULE) * GRANULE)
        except self.driver.MemoryError as error:
            free, total = self.driver.mem_get_info()
            raise UserError(
                f"no room for {n_bytes / 2**20:,.0f} MiB ({what}) on {self}: {free / 2**20:,.0f} of "
                f"{total / 2**20:,.0f} MiB are free. Lower {BATCH_KEYS}, "
                "or stop other programs there"
            ) from error
        self.driver.memset_d8(allocation, 0, n_bytes)
        self.context.synchronize()  # the device sets memory asynchronously; our streams would not wait for it
        return CudaBlock(self, allocation, n_bytes, self.pci_bus_id, owned=True)

    def upload(self, block: CudaBlock, array: np.ndarray) -> None:
        """Copy an array to the beginning of a block, and wait for the copy."""
        self.driver.memcpy_htod(block.pointer, np.ascontiguousarray(array))
        self.context.synchronize()  # a copy from pageable memory may still be running

    def receive(self, pipe: Pipe, what: str) -> CudaBlock:
        return self.open(pipe.receive(CudaHandle, what))

    def open(self, handle: CudaHandle) -> CudaBlock:
        """Return another process's block.

        Raises:
            UserError: It cannot be opened.
        """
        with self.sharing("memory"):
            # PyCUDA accepts only a bytearray here.
            allocation = self.driver.IPCMemoryHandle(bytearray(handle.ipc))
        return CudaBlock(self, allocation, handle.n_bytes, handle.pci_bus_id, owned=False)

    def pinned(self, n_bytes: int) -> np.ndarray:
        try:
            memory: np.ndarray = self.driver.pagelocked_empty(n_bytes, np.uint8)
        except (self.driver.MemoryError, self.driver.RuntimeError) as error:
            raise UserError(
                f"no room for {n_bytes / 2**20:,.0f} MiB of page-locked host memory (copies; {error}); "
                f"lower {BATCH_KEYS}, or raise the limit on locked memory (ulimit -l)"
            ) from error
        return memory

    def lock(self, block: HostBlock) -> None:
        pagelock(block)

    def events(self, number: int) -> list[Any]:
        """Return new events of this process; waiting for one does not keep a core busy."""
        flags = self.driver.event_flags
        return [self.driver.Event(flags.DISABLE_TIMING | flags.BLOCKING_SYNC) for _ in range(number)]

    def shared_events(self, number: int) -> list[Any]:
        """Return new events that other processes can open.

        Raises:
            UserError: Processes cannot share events on this system.
        """
        flags = self.driver.event_flags
        kind = flags.INTERPROCESS | flags.DISABLE_TIMING | flags.BLOCKING_SYNC
        with self.sharing("events"):
            return [self.driver.Event(kind) for _ in range(number)]

    def send_events(self, pipe: Pipe, events: list[Any]) -> None:
        """Send the handles of shared events of this process."""
        pipe.send(self.event_handles(events))

    def receive_events(self, pipe: Pipe, what: str) -> list[Any]:
        """Open the events whose handles the other end sends."""
        return self.open_events(pipe.receive(EventHandles, what))

    def event_handles(self, events: list[Any]) -> EventHandles:
        """Return the handles of shared events of this process."""
        with self.sharing("events"):
            return EventHandles(tuple(bytes(event.ipc_handle()) for event in events))

    def open_events(self, handles: EventHandles) -> list[Any]:
        """Return other processes' events.

        Raises:
            UserError: They cannot be opened.
        """
        with self.sharing("events"):
            return [self.driver.Event.from_ipc_handle(bytearray(handle)) for handle in handles.ipc]

    @contextmanager
    def sharing(self, what: str) -> Iterator[None]:
        """Turn the driver's errors inside this context into a UserError that says how to enable sharing."""
        try:
            yield
        except self.driver.Error as error:
            raise UserError(
                f"{self}: {what} can't be shared between processes ({error}): {_REMEDY}"
            ) from error
