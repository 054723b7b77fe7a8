"""Memory that another process can open: blocks, and handles that go over a pipe once.

A *block* is one piece of memory on one device. The process that allocates it owns it; a process that receives
its handle opens the same bytes. Arenas and slot rings are blocks; nothing else is shared.

`host.py` is for CPUs, `cuda.py` for NVIDIA GPUs, `pagelock.py` for memory between them; lockstep/backends
chooses. `limits.py` says how much host memory there is still to be had.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from lockstep.comm.pipes import Pipe

if TYPE_CHECKING:  # the launcher opens blocks too and has no need of torch
    import torch


class Block(ABC):
    """One piece of shared device memory, `n_bytes` long and zero at first."""

    n_bytes: int

    @abstractmethod
    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int = 0) -> "torch.Tensor":
        """A tensor on these very bytes, C-contiguous, from byte `offset` on. No copy."""

    @abstractmethod
    def send(self, pipe: Pipe) -> None:
        """Sends the handle with which the process at the other end of the pipe opens this block."""

    @abstractmethod
    def close(self) -> None:
        """Gives up this process's hold. The memory goes when nobody holds it; closing twice is harmless."""


class Memory(ABC):
    """The allocator of one device."""

    @abstractmethod
    def allocate(self, n_bytes: int, what: str) -> Block:
        """A new block that this process owns.

        Raises UserError when the device has no room for it; `what` says there what it is for.
        """

    @abstractmethod
    def pinned(self, n_bytes: int, what: str = "copies") -> np.ndarray:
        """Host memory, uint8 (n_bytes,), that the device copies from and to without the processor's help.

        Raises UserError when there is no room for it.
        """

    @abstractmethod
    def receive(self, pipe: Pipe, what: str) -> Block:
        """Opens the block whose handle the other end of the pipe sends; `what` names it in errors."""
