"""Page-locking of shared host memory, from and to which a device then copies by DMA.

It calls the driver by ctypes, because PyCUDA's `register_host_memory` crashes on arrays in a mapped file
(PyCUDA 2026.1 with NumPy 2.4).
"""

import ctypes

import numpy as np

from lockstep.errors import UserError
from lockstep.memory.host import HostBlock

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: locked for every context of this process
_SUCCESS = 0


def pagelock(block: HostBlock) -> None:
    """Lock a block's pages in this process, in the current context.

    Raises:
        UserError: The driver refuses.
    """
    result = _driver().cuMemHostRegister_v2(_address(block), ctypes.c_size_t(block.n_bytes), _PORTABLE)
    if result != _SUCCESS:
        raise UserError(
            f"{block.n_bytes / 2**20:,.0f} MiB of host memory can't be page-locked: CUDA error {result}. "
            "Use a smaller model or fewer devices, or raise the limit on locked memory (ulimit -l)."
        )


def unlock(block: HostBlock) -> None:
    """Undo `pagelock`, after the device's last use of the block."""
    result = _driver().cuMemHostUnregister(_address(block))
    assert result == _SUCCESS, f"cuMemHostUnregister: CUDA error {result}"


def _address(block: HostBlock) -> ctypes.c_void_p:
    return ctypes.c_void_p(block.array(np.uint8, (1,)).ctypes.data)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
