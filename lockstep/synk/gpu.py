"""A rank's GPU, for torch callables: its memory, the stream that all happens in, collectives with others.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from lockstep.backends import cuda
from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange.p2p import MOST_RANKS, PeerTransport
from lockstep.exchange.proof import prove
from lockstep.exchange.staged import StagedTransport
from lockstep.exchange.transport import Transport
from lockstep.memory.cuda import CudaBlock, CudaMemory
from lockstep.synk.commands import Meeting

if TYPE_CHECKING:
    from lockstep.synk.here import Here

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: never waits for the default stream


class Gpu:
    """device: cuda:<n>, this rank's. group: pipes to all other ranks."""

    def __init__(self, device: str, group: Group) -> None:
        self.memory, self.group = CudaMemory(device), group
        self.stream = self.memory.driver.Stream(_NON_BLOCKING)
        self._inputs: dict[
            int, tuple[np.ndarray, CudaBlock]
        ] = {}  # page-locked memory, and where it is copied to
        self._reaches: bool | None = None
        try:
            cuda.start_torch(self.memory.device, self.stream)
        except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
            raise UserError(f"torch {torch.__version__} can't use {self.memory}: {error}") from error

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that computes with torch, behind what the stream has been asked so far."""
        return function(*arguments)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Inputs of a call, on the device. They are there until the next call's."""
        self.stream.synchronize()  # the last call's copies out of page-locked memory
        return [self._upload(number, array) for number, array in enumerate(arrays)]

    def read(self, block: CudaBlock, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A copy of an array that lies at the beginning of a block."""
        array = np.empty(shape, dtype)
        if array.size:
            self.memory.driver.memcpy_dtoh_async(array, block.pointer, self.stream)
        self.stream.synchronize()
        return array

    def write(self, block: CudaBlock, array: np.ndarray) -> None:
        """The reverse; it is there when this returns."""
        self.stream.synchronize()  # what still reads the old values
        if array.size:
            self.memory.upload(block, array)

    def open(self, block: CudaBlock, n_elements: int) -> Transport:
        """Collectives on this block and the other ranks' of the same size. All ranks call it together."""
        if self._reaches is None:
            self._reaches = not any(pair.problem for pair in prove(self.memory, self.stream, self.group))
        kind = PeerTransport if self._reaches else StagedTransport
        return kind(self.memory, self.stream, block, n_elements, self.group)

    def close(self) -> None:
        """Gives up its inputs' memory."""
        self.stream.synchronize()
        for _, block in self._inputs.values():
            block.close()
        self._inputs = {}

    def _upload(self, number: int, array: np.ndarray) -> torch.Tensor:
        locked, block = self._inputs.get(number, (None, None))
        if locked is None or block is None or locked.nbytes < array.nbytes:
            if block is not None:
                block.close()
            n_bytes = max(1, array.nbytes)
            locked, block = self.memory.pinned(n_bytes), self.memory.allocate(n_bytes, "an input")
            self._inputs[number] = locked, block
        if array.nbytes:
            staged = locked[: array.nbytes]
            staged.view(array.dtype).reshape(array.shape)[...] = array
            self.memory.driver.memcpy_htod_async(block.pointer, staged, self.stream)
        return block.tensor(torch.from_numpy(np.empty(0, array.dtype)).dtype, array.shape)


@dataclass(frozen=True)
class UseGpus:
    """Step: every rank takes its device. devices: by rank."""

    devices: tuple[str, ...]
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return ()

    def run(self, here: "Here") -> Generator[Meeting, Any, None]:
        if here.size > MOST_RANKS:
            raise UserError(f"fork(): at most {MOST_RANKS} ranks can be on GPUs, not {here.size}")
        assert here.group is not None
        here.gpu = Gpu(self.devices[here.rank], here.group)
        return
        yield  # a step is a generator, also where it meets nobody


@dataclass(frozen=True)
class LeaveGpus:
    """Step: nobody has memory of GPUs any more."""

    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return ()

    def run(self, here: "Here") -> Generator[Meeting, Any, None]:
        for _, shared in sorted(here.shareds.items()):
            shared.leave_gpu()
        if here.gpu is not None:
            here.gpu.close()
        return
        yield  # a step is a generator, also where it meets nobody
