"""Memory that processes share: blocks, and handles that are sent over a pipe once.

A *block* is one piece of memory on one device. The process that allocates it owns it; a process that receives
its handle opens the same bytes. Arenas and slot rings are blocks, and processes share no other memory.

`host.py` is for CPUs, `cuda.py` for NVIDIA GPUs, `pagelock.py` for page-locked host memory; lockstep/backends
chooses. `limits.py` finds out how much host memory may be allocated.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from lockstep.comm.pipes import Pipe

if TYPE_CHECKING:  # the launcher opens blocks too, without importing torch
    import torch

    from lockstep.memory.host import HostBlock


class Block(ABC):
    """One piece of shared memory, `n_bytes` long and zero at first."""

    n_bytes: int

    @abstractmethod
    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int = 0) -> "torch.Tensor":
        """Return a C-contiguous tensor on these bytes from byte `offset` on, without a copy."""

    @abstractmethod
    def send(self, pipe: Pipe) -> None:
        """Send the handle with which the process at the other end of the pipe opens this block."""

    @abstractmethod
    def close(self) -> None:
        """Close the block in this process; the last process frees the memory. Closing twice is harmless."""


class Memory(ABC):
    """The allocator of one device."""

    @abstractmethod
    def allocate(self, n_bytes: int, what: str) -> Block:
        """Return a new block that this process owns.

        Args:
            what: Purpose of the memory, for errors.

        Raises:
            UserError: The device has too little memory.
        """

    @abstractmethod
    def pinned(self, n_bytes: int) -> np.ndarray:
        """Return page-locked host memory, uint8 (n_bytes,), from and to which the device copies by DMA.

        Raises:
            UserError: There is too little memory.
        """

    def lock(self, block: "HostBlock") -> None:  # noqa: B027 (CPUs copy from any memory)
        """Page-lock shared host memory in this process, so that the device copies by DMA.

        Raises:
            UserError: The driver refuses.
        """

    @abstractmethod
    def receive(self, pipe: Pipe, what: str) -> Block:
        """Open the block whose handle the other end of the pipe sends; `what` names it in errors."""
