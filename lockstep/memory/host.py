"""Shared host memory: an anonymous memory file, mapped by every process that has its descriptor.

`memfd_create(2)` makes a file without a name, so nothing remains in /dev/shm when processes are killed. The
handle is the descriptor itself, which the pipe duplicates into the other process.
"""

import ctypes
import errno
import mmap
import os
import resource
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from lockstep.comm.pipes import Pipe
from lockstep.errors import BATCH_KEYS, UserError
from lockstep.memory import Block, Memory
from lockstep.memory.limits import allowed_bytes

if TYPE_CHECKING:
    import torch


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]
_MAP_FAILED = ctypes.c_void_p(-1).value
# By the reference's id. Not weakref.finalize: as Python ends, it goes over all its finalizers, and fails if
# a thread maps or unmaps a buffer meanwhile.
_buffers: "dict[int, weakref.ref[ctypes.Array[ctypes.c_uint8]]]" = {}


@dataclass(frozen=True)
class HostHandle:
    """The message that shares a block; the descriptor follows it."""

    n_bytes: int


def _mapped(descriptor: int, n_bytes: int) -> "ctypes.Array[ctypes.c_uint8]":
    """Return the file's bytes, mapped as long as anything refers to them.

    mmap.mmap is not used, because it keeps a second descriptor open as long as the mapping exists.
    """
    address = _libc.mmap(None, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    buffer = (ctypes.c_uint8 * n_bytes).from_address(address)
    # The callback is compiled code, since what a signal's handler raises in a callback of Python code is lost
    # (Ctrl-C, too), and unmapping takes long. munmap ignores its third argument, the reference.
    reference = weakref.ref(buffer, partial(_libc.munmap, address, n_bytes))
    for number, earlier in list(_buffers.items()):
        if earlier() is None:
            _buffers.pop(number, None)
    _buffers[id(reference)] = reference
    return buffer


class HostBlock(Block):
    """A mapped memory file. Its views keep the mapping alive after `close`."""

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._descriptor: int | None = descriptor
        self._map: ctypes.Array[ctypes.c_uint8] | None = _mapped(descriptor, n_bytes)

    @property
    def is_closed(self) -> bool:
        """Whether the memory file is closed; views may still exist."""
        return self._descriptor is None

    @property
    def descriptor(self) -> int:
        """The memory file's descriptor, for a process that is to open it."""
        assert self._descriptor is not None, "the block is closed"
        return self._descriptor

    def array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """Return a NumPy array on these bytes from byte `offset` on, without a copy."""
        assert self._map is not None, "the block is closed"
        return np.ndarray(shape, dtype, buffer=memoryview(self._map), offset=offset)

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int = 0) -> "torch.Tensor":
        import torch

        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        assert offset + n_bytes <= self.n_bytes, "the view does not fit into the block"
        raw = torch.from_numpy(self.array(np.uint8, (n_bytes,), offset))
        return raw.view(dtype).view(shape)

    def send(self, pipe: Pipe) -> None:
        descriptor = self.descriptor
        pipe.send(HostHandle(self.n_bytes))
        pipe.send_descriptor(descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._map = None  # the last view unmaps the memory


class HostMemory(Memory):
    """The allocator of memory files.

    Args:
        advice: Last sentence of the error of too little memory.
    """

    def __init__(self, advice: str = f"Lower {BATCH_KEYS}, or use fewer devices.") -> None:
        self._advice = advice

    def allocate(self, n_bytes: int, what: str) -> HostBlock:
        assert n_bytes > 0
        # A control group would not refuse but kill a process, maybe another one.
        if n_bytes > allowed_bytes():
            raise UserError(_no_room(n_bytes, what, self._advice))
        descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC)
        try:
            # Allocate now, so that a lack of memory is an error here and not a SIGBUS within a step.
            os.posix_fallocate(descriptor, 0, n_bytes)
            return HostBlock(descriptor, n_bytes)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EFBIG:
                raise UserError(_over_limit(n_bytes, what)) from error
            if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise
            raise UserError(_no_room(n_bytes, what, self._advice)) from error

    def pinned(self, n_bytes: int) -> np.ndarray:
        block = self.allocate(n_bytes, "copies")
        memory = block.array(np.uint8, (n_bytes,))
        block.close()  # the array keeps the mapping alive
        return memory

    def receive(self, pipe: Pipe, what: str) -> HostBlock:
        handle = pipe.receive(HostHandle, what)
        descriptor = pipe.receive_descriptor(what)
        try:
            return HostBlock(descriptor, handle.n_bytes)
        except OSError:
            os.close(descriptor)
            raise


def _over_limit(n_bytes: int, what: str) -> str:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return (
        f"no file of {n_bytes:,} bytes may be made for shared host memory ({what}): the limit is {most:,} "
        "bytes. Raise it (ulimit -f), or use less memory."
    )


def _no_room(n_bytes: int, what: str, advice: str) -> str:
    return (
        f"no room for {n_bytes / 2**20:,.0f} MiB of shared host memory ({what}): "
        f"{allowed_bytes() / 2**20:,.0f} MiB are allowed. {advice}"
    )
