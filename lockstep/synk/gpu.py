"""A rank's GPU, for torch callables: its memory, the stream that all happens in, collectives with others.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from lockstep.backends import cuda
from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange import Op
from lockstep.exchange.p2p import MOST_RANKS, PeerTransport
from lockstep.exchange.proof import prove
from lockstep.exchange.staged import StagedTransport
from lockstep.exchange.transport import Transport
from lockstep.memory.cuda import NON_BLOCKING, CudaBlock, CudaMemory
from lockstep.synk import rows
from lockstep.synk.commands import Meeting
from lockstep.synk.gpu_folds import Folder, KeptOutputs

if TYPE_CHECKING:
    from lockstep.synk.here import Here


class Gpu:
    """device: cuda:<n>, this rank's. group: pipes to all other ranks."""

    def __init__(self, device: str, group: Group) -> None:
        self.memory, self.group = CudaMemory(device), group
        self.stream = self.memory.driver.Stream(NON_BLOCKING)
        self._inputs: dict[
            int, tuple[np.ndarray, CudaBlock]
        ] = {}  # page-locked memory, and where it is copied to
        self._reaches: bool | None = None
        self.folder = Folder(self)
        self.kept = KeptOutputs(self, self.folder)
        try:
            cuda.start_torch(self.memory.device, self.stream)
        except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
            raise UserError(f"torch {torch.__version__} can't use {self.memory}: {error}") from error

    def compute(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls a function that computes with torch, behind what the stream has been asked so far."""
        return function(*arguments, **options)

    def upload(
        self, arrays: Sequence[np.ndarray], choices: Sequence[rows.Choice | None]
    ) -> list[torch.Tensor]:
        """Chosen rows of a call's inputs, on the device, until the next call's. None: a whole array."""
        self.kept.clear()
        self.stream.synchronize()  # the last call's copies out of page-locked memory
        pairs = zip(arrays, choices, strict=True)
        return [self._upload(number, array, choice) for number, (array, choice) in enumerate(pairs)]

    def write(self, block: CudaBlock, array: np.ndarray) -> None:
        """Puts an array at the beginning of a block; it is there when this returns."""
        self.stream.synchronize()  # what still reads the old values
        if array.size:
            self.memory.upload(block, array)

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy of a tensor on the device."""
        found: torch.Tensor = self.compute(tensor.to, "cpu", copy=True)
        return found.numpy()

    def all_reduce(self, transport: Transport, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """Folds what lies at the beginning of all ranks' blocks. tensor: this rank's, on its block.

        weight: this rank's share of the mean; None where they are equal, or for another op.
        """
        if weight == 0:
            self.compute(tensor.zero_)  # whatever there is: nan times zero would be nan
        elif weight is not None:
            self.compute(tensor.mul_, weight)
        transport.all_reduce((0, tensor.numel()), op if weight is None else "sum")

    def open(self, block: CudaBlock, n_elements: int) -> Transport:
        """Collectives on this block and the other ranks' of the same size. All ranks call it together."""
        if self._reaches is None:
            self._reaches = not any(pair.problem for pair in prove(self.memory, self.stream, self.group))
        kind = PeerTransport if self._reaches else StagedTransport
        return kind(self.memory, self.stream, block, n_elements, self.group)

    def close(self) -> None:
        """Gives up its memory; all ranks together."""
        self.kept.clear()
        self.folder.close()
        self.stream.synchronize()
        for _, block in self._inputs.values():
            block.close()
        self._inputs = {}

    def _upload(self, number: int, array: np.ndarray, choice: rows.Choice | None) -> torch.Tensor:
        shape = array.shape if choice is None else (rows.count(choice), *array.shape[1:])
        n_bytes = math.prod(shape) * array.itemsize
        locked, block = self._inputs.get(number, (None, None))
        if locked is None or block is None or locked.nbytes < n_bytes:
            if block is not None:
                block.close()
            room = max(1, n_bytes)
            locked, block = self.memory.pinned(room), self.memory.allocate(room, "an input")
            self._inputs[number] = locked, block
        if n_bytes:
            staged = locked[:n_bytes]
            _copy_rows(array, choice, staged.view(array.dtype).reshape(shape))
            self.memory.driver.memcpy_htod_async(block.pointer, staged, self.stream)
        return block.tensor(torch.from_numpy(np.empty(0, array.dtype)).dtype, shape)


def _copy_rows(array: np.ndarray, choice: rows.Choice | None, target: np.ndarray) -> None:
    if choice is None or isinstance(choice, slice):
        target[...] = array if choice is None else array[choice]
    else:
        array.take(choice, axis=0, out=target, mode="clip")  # checked before; "raise" would copy twice


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
