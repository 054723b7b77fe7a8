"""Device memory shared by CUDA IPC: PyCUDA allocates and opens, torch computes on the very same bytes.

Rules that shape this file (CUDA driver API, cuIpcGetMemHandle and cuIpcOpenMemHandle):
- A handle is that of a whole allocation, so every block is one `cuMemAlloc` of its own, never a piece of
  torch's cache.
- A process can't open its own handles, and an importer closes before the owner frees.
- All is done in the device's primary context, the one that torch uses; a context of our own could not share.

This file has not run on a GPU yet. The program refuses cuda devices until exchange and loading are there too.
"""

from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.memory import Block, Memory
from lockstep.pipes import Pipe

LEAST_BYTES = 2 << 20  # smaller allocations share a page with others, and IPC would export all of it


@dataclass(frozen=True)
class CudaHandle:
    """What goes over the pipe: an IPC handle, and the size that was asked for."""

    ipc: bytes
    n_bytes: int


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


def start_torch(device: torch.device) -> None:
    """Makes torch create the device's primary context, which PyCUDA then shares."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.empty(1, device=device)


def as_bytes(block: "CudaBlock", device: torch.device) -> torch.Tensor:
    """A block as a uint8 tensor (n_bytes,). No copy."""
    return torch.as_tensor(_Bytes(block), device=device)


class CudaBlock(Block):
    """An allocation of this process, or one of another process that is open here.

    `allocation` is PyCUDA's DeviceAllocation or IPCMemoryHandle: its owner has `free`, an importer has
    `close`.
    """

    def __init__(self, memory: "CudaMemory", allocation: Any, n_bytes: int, owned: bool) -> None:
        self.n_bytes = n_bytes
        self._memory, self._allocation, self._owned = memory, allocation, owned

    @property
    def pointer(self) -> int:
        """The device address."""
        assert self._allocation is not None, "the block is closed"
        return int(self._allocation)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        raw = as_bytes(self, self._memory.device)
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert offset + n_bytes <= self.n_bytes, "the view does not fit into the block"
        return raw[offset : offset + n_bytes].view(dtype).view(shape)

    def send(self, pipe: Pipe) -> None:
        assert self._owned, "only its owner can share a block"
        pipe.send(CudaHandle(bytes(self._memory.driver.mem_get_ipc_handle(self._allocation)), self.n_bytes))

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
    """The allocator of 'cuda:<n>'. Holds the device's primary context for the thread that made it."""

    def __init__(self, device: str) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            reason = f"{device} needs PyCUDA, which can't be imported ({error})"
            raise UserError(f"{reason}: pip install .[cuda]") from error
        self.driver, self.device = driver, torch.device(device)
        try:
            start_torch(self.device)
            driver.init()
            self._context = driver.Device(self.device.index).retain_primary_context()
        except (RuntimeError, driver.Error) as error:
            raise UserError(f"{device} can't be used: {error}") from error
        self._context.push()

    def allocate(self, n_bytes: int) -> CudaBlock:
        assert n_bytes > 0
        try:
            allocation = self.driver.mem_alloc(max(n_bytes, LEAST_BYTES))
            self.driver.memset_d8(allocation, 0, n_bytes)
        except self.driver.MemoryError as error:
            free, total = self.driver.mem_get_info()
            raise UserError(
                f"no room for {n_bytes / 2**20:,.0f} MiB on {self.device}: {free / 2**20:,.0f} of "
                f"{total / 2**20:,.0f} MiB are free; lower batch_size or n_slots"
            ) from error
        return CudaBlock(self, allocation, n_bytes, owned=True)

    def receive(self, pipe: Pipe, what: str) -> CudaBlock:
        handle = pipe.receive(CudaHandle, what)
        # PyCUDA takes nothing but a bytearray here
        allocation = self.driver.IPCMemoryHandle(bytearray(handle.ipc))
        return CudaBlock(self, allocation, handle.n_bytes, owned=False)

    def close(self) -> None:
        """Gives the context back; all blocks must be closed before."""
        self._context.pop()
