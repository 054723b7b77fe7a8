"""Device memory shared by CUDA IPC: PyCUDA allocates and opens, torch computes on the very same bytes.

Rules that shape this file (CUDA driver API, cuIpcGetMemHandle and cuIpcOpenMemHandle):
- A handle is that of a whole allocation, so every block is one `cuMemAlloc` of its own, never a piece of
  torch's cache.
- A process can't open its own handles, and an importer closes before the owner frees.
- An allocation is a multiple of 2 MiB, CUDA's own unit: what else lay in its last one would be exported too.
- Memory is shared through the driver alone; an interprocess event is a file in /dev/shm (leftovers.py). So
  there are interprocess events only where something is shared.
- All is done in the device's primary context, the one that torch uses; a context of our own could not share.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

import atexit
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.memory import Block, Memory

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
    """What goes over the pipe: an IPC handle, the size that was asked for, and the owner's device."""

    ipc: bytes
    n_bytes: int
    pci_bus_id: str


@dataclass(frozen=True)
class EventHandles:
    """Interprocess events, to be opened by the receiver."""

    ipc: tuple[bytes, ...]


class _Bytes:
    """A block as torch understands it (CUDA array interface, version 3). Tensors on it keep it alive."""

    def __init__(self, block: "CudaBlock") -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "shape": (block.n_bytes,),
            "typestr": "|u1",
            "data": (block.pointer, False),
            "version": 3,
        }


def as_bytes(block: "CudaBlock", device: str) -> "torch.Tensor":
    """A block as a uint8 tensor (n_bytes,). No copy."""
    import torch

    return torch.as_tensor(_Bytes(block), device=device)


class CudaBlock(Block):
    """An allocation of this process, or one of another process that is open here.

    `allocation` is PyCUDA's DeviceAllocation or IPCMemoryHandle: its owner has `free`, an importer has
    `close`. `pci_bus_id` is of the device where the memory is.
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
        """What another process opens this block with. Raises UserError where nothing can be shared."""
        with self._memory.sharing("memory"):
            ipc = bytes(self._memory.driver.mem_get_ipc_handle(self._allocation))
        return CudaHandle(ipc, self.n_bytes, self.pci_bus_id)

    def close(self) -> None:
        """Frees or closes. The caller has made sure that no stream and no importer uses it any more."""
        if self._allocation is None:
            return
        if self._owned:
            self._allocation.free()
        else:
            self._allocation.close()
        self._allocation = None


class CudaMemory(Memory):
    """The allocator of 'cuda:<n>'.

    The device's primary context is current in the thread that made it until the process ends: PyCUDA's
    objects need it whenever they are dropped.

    driver: the module pycuda.driver. device: 'cuda:<n>'. pci_bus_id: names the device whatever a process may
    number it.
    """

    def __init__(self, device: str) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            reason = f"{device} needs PyCUDA, which can't be imported ({error})"
            remedy = "install it, or, if it is there, a driver as new as the CUDA it was built with"
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
                f"{total / 2**20:,.0f} MiB are free; lower batch_size or n_slots, or see what else runs there"
            ) from error
        self.driver.memset_d8(allocation, 0, n_bytes)
        self.context.synchronize()  # the device does it later, and our streams would not wait for it
        return CudaBlock(self, allocation, n_bytes, self.pci_bus_id, owned=True)

    def upload(self, block: CudaBlock, array: np.ndarray) -> None:
        """Copies an array to the beginning of a block; it is there when this returns."""
        self.driver.memcpy_htod(block.pointer, np.ascontiguousarray(array))
        self.context.synchronize()  # the copy out of pageable memory may still be on its way

    def receive(self, pipe: Pipe, what: str) -> CudaBlock:
        return self.open(pipe.receive(CudaHandle, what))

    def open(self, handle: CudaHandle) -> CudaBlock:
        """Another process's block. Raises UserError where it can't be opened."""
        with self.sharing("memory"):
            # PyCUDA takes nothing but a bytearray here
            allocation = self.driver.IPCMemoryHandle(bytearray(handle.ipc))
        return CudaBlock(self, allocation, handle.n_bytes, handle.pci_bus_id, owned=False)

    def pinned(self, n_bytes: int, what: str = "copies") -> np.ndarray:
        try:
            memory: np.ndarray = self.driver.pagelocked_empty(n_bytes, np.uint8)
        except (self.driver.MemoryError, self.driver.RuntimeError) as error:
            raise UserError(
                f"no room for {n_bytes / 2**20:,.0f} MiB of page-locked host memory ({what}; {error}); "
                "lower batch_size or n_slots, or raise the limit on locked memory (ulimit -l)"
            ) from error
        return memory

    def events(self, number: int) -> list[Any]:
        """New events of this process; waiting for one does not keep a core busy."""
        flags = self.driver.event_flags
        return [self.driver.Event(flags.DISABLE_TIMING | flags.BLOCKING_SYNC) for _ in range(number)]

    def shared_events(self, number: int) -> list[Any]:
        """The same, to be opened by other processes. Raises UserError where nothing can be shared."""
        flags = self.driver.event_flags
        kind = flags.INTERPROCESS | flags.DISABLE_TIMING | flags.BLOCKING_SYNC
        with self.sharing("events"):
            return [self.driver.Event(kind) for _ in range(number)]

    def send_events(self, pipe: Pipe, events: list[Any]) -> None:
        """Sends the handles of shared events of this process."""
        pipe.send(self.event_handles(events))

    def receive_events(self, pipe: Pipe, what: str) -> list[Any]:
        """Opens the events whose handles the other end sends."""
        return self.open_events(pipe.receive(EventHandles, what))

    def event_handles(self, events: list[Any]) -> EventHandles:
        """Of shared events of this process."""
        with self.sharing("events"):
            return EventHandles(tuple(bytes(event.ipc_handle()) for event in events))

    def open_events(self, handles: EventHandles) -> list[Any]:
        """Other processes' events. Raises UserError where they can't be opened."""
        with self.sharing("events"):
            return [self.driver.Event.from_ipc_handle(bytearray(handle)) for handle in handles.ipc]

    @contextmanager
    def sharing(self, what: str) -> Iterator[None]:
        """Around what may fail where processes can't share: says so, and what to do."""
        try:
            yield
        except self.driver.Error as error:
            raise UserError(
                f"{self}: {what} can't be shared between processes ({error}): {_REMEDY}"
            ) from error
