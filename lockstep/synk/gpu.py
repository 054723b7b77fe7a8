"""A rank's GPU for torch callables: its memory, its one stream, and collectives with the other ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.backends import cuda
from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange import Op
from lockstep.exchange.p2p import PeerTransport
from lockstep.exchange.proof import prove
from lockstep.exchange.reduction import combine_into
from lockstep.exchange.staged import StagedTransport
from lockstep.exchange.transport import Transport
from lockstep.memory.cuda import NON_BLOCKING, CudaBlock, CudaMemory
from lockstep.synk import rows
from lockstep.synk.results import NARROW_PARTS, REDUCE_OPS, DeviceOutput, PartReducer, check_same_shape

LARGE_BYTES = 1 << 20  # below, copying to host memory takes less than one more command to the ranks


class RankGpu:
    """The GPU of one rank.

    Args:
        device: cuda:<n>.
        group: Pipes to all other ranks.
    """

    def __init__(self, device: str, group: Group) -> None:
        self.memory, self.group = CudaMemory(device), group
        self.stream = self.memory.driver.Stream(NON_BLOCKING)
        self._inputs: dict[int, tuple[np.ndarray, CudaBlock]] = {}  # page-locked memory, and its copy
        self._reaches: bool | None = None
        self.reducer = DeviceReducer(self)
        self.outputs = DeviceOutputs(self, self.reducer)
        try:
            cuda.start_torch(self.memory.device, self.stream)
        except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
            raise UserError(f"torch {torch.__version__} can't use {self.memory}: {error}") from error

    def compute(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that computes with torch; the stream orders it after earlier work."""
        return function(*arguments, **options)

    def upload(
        self, arrays: Sequence[np.ndarray], choices: Sequence[rows.Choice | None]
    ) -> list[torch.Tensor]:
        """Return the chosen rows of a call's inputs on the device; None chooses a whole array.

        The tensors are valid until the next call.
        """
        self.outputs.clear()
        self.stream.synchronize()  # the last call's copies out of page-locked memory
        pairs = zip(arrays, choices, strict=True)
        return [self._upload(number, array, choice) for number, (array, choice) in enumerate(pairs)]

    def write(self, block: CudaBlock, array: np.ndarray) -> None:
        """Copy an array to the start of a block, and wait for the copy."""
        self.stream.synchronize()  # earlier work may still read the old values
        if array.size:
            self.memory.upload(block, array)

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """Return a copy of a device tensor in host memory."""
        copy: torch.Tensor = self.compute(tensor.to, "cpu", copy=True)
        return copy.numpy()

    def all_reduce(self, transport: Transport, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """Reduce the arrays at the start of all ranks' blocks.

        Args:
            tensor: This rank's array, on its block.
            weight: This rank's weight in the mean; None for equal weights and for other ops.
        """
        if weight == 0:
            self.compute(tensor.zero_)  # not multiplied: nan times zero is nan
        elif weight is not None:
            self.compute(tensor.mul_, weight)
        transport.all_reduce((0, tensor.numel()), op if weight is None else "sum")

    def open(self, block: CudaBlock, n_elements: int) -> Transport:
        """Open collectives on all ranks' blocks of this size. All ranks call it together."""
        if self._reaches is None:
            self._reaches = not any(pair.problem for pair in prove(self.memory, self.stream, self.group))
        kind = PeerTransport if self._reaches else StagedTransport
        return kind(self.memory, self.stream, block, n_elements, self.group)

    def close(self) -> None:
        """Free the memory. All ranks call it together."""
        self.outputs.clear()
        self.reducer.close()
        self.stream.synchronize()
        for _, block in self._inputs.values():
            block.close()
        self._inputs = {}

    def leave(self) -> None:
        """Let torch compute without this object's stream, which is destroyed with it."""
        cuda.stop_torch(self.memory.device)

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


class DeviceReducer:
    """A block of equal size on every rank's GPU, into which tensors are copied to be reduced."""

    def __init__(self, gpu: "RankGpu") -> None:
        self._gpu = gpu
        self._block: CudaBlock | None = None
        self._transport: Transport | None = None
        self._n_elements = 0

    def reduce(self, tensor: torch.Tensor, op: Op, weight: float | None) -> torch.Tensor:
        """Return the reduction of all ranks' float32 tensors of one shape. All ranks call it together.

        The result is valid until the next call.

        Args:
            weight: This rank's weight in the mean; None for equal weights.
        """
        if tensor.numel() > self._n_elements:
            self._grow(tensor.numel())
        if self._block is None or self._transport is None:
            return tensor  # it has no elements
        target = self._block.tensor(torch.float32, tuple(tensor.shape))
        self._gpu.compute(target.copy_, tensor)
        self._gpu.all_reduce(self._transport, target, op, weight)
        return target

    def close(self) -> None:
        """Free the block. All ranks call it together."""
        if self._transport is not None:
            self._transport.close()
        if self._block is not None:
            self._gpu.stream.synchronize()
            self._block.close()
        self._transport, self._block, self._n_elements = None, None, 0

    def _grow(self, n_elements: int) -> None:
        self.close()
        self._block = self._gpu.memory.allocate(4 * n_elements, "a reduction on the GPU")
        self._transport = self._gpu.open(self._block, n_elements)
        self._n_elements = n_elements


class DeviceOutputs:
    """The outputs of the last call that remain on the GPU, by number."""

    def __init__(self, gpu: "RankGpu", reducer: DeviceReducer) -> None:
        self._gpu, self._reducer = gpu, reducer
        self._tensors: dict[int, torch.Tensor] = {}

    def should_keep(self, value: Any) -> bool:
        """Return True if the output is faster to reduce on the GPU than in host memory."""
        return torch.is_tensor(value) and value.dtype == torch.float32 and value.nbytes >= LARGE_BYTES

    def make_reducer(self, number: int, otherwise: PartReducer) -> "DevicePartReducer":
        """Return a reducer of an output's parts; `otherwise` reduces the parts that are in host memory."""
        return DevicePartReducer(self._gpu, number, otherwise)

    def add(self, number: int, value: torch.Tensor) -> DeviceOutput:
        """Keep an output, and return its description for the caller."""
        self._tensors[number] = value.detach()
        return DeviceOutput(tuple(value.shape))

    def reduce(self, number: int, op: Op, weight: float | None) -> torch.Tensor:
        """Remove an output, and return its reduction over all ranks, as `DeviceReducer.reduce` does."""
        return self._reducer.reduce(self._tensors.pop(number), op, weight)

    def fetch(self, number: int) -> np.ndarray:
        """Remove an output, and return a copy of it in host memory."""
        return self._gpu.fetch(self._tensors.pop(number))

    def clear(self) -> None:
        """Free all outputs."""
        self._tensors.clear()


class DevicePartReducer(PartReducer):
    """A reducer of the parts of output `number`: tensors on the GPU, other values in host memory."""

    def __init__(self, gpu: "RankGpu", number: int, host: PartReducer) -> None:
        super().__init__(host.mode, host.n_rows, host.what)
        self._gpu, self._number = gpu, number
        self._total: torch.Tensor | None = None

    def add(self, value: Any, n_rows: int) -> None:
        if torch.is_tensor(value) and not self._parts:
            self._gpu.compute(self._add, value.detach(), n_rows)
            return
        if self._total is not None:
            check_same_shape([tuple(self._total.shape), value.shape], self.what, str(self.mode))
            value = self._gpu.compute(torch.as_tensor, value, device=self._total.device)
            self._gpu.compute(self._add, value, n_rows)
            return
        super().add(self._gpu.fetch(value) if torch.is_tensor(value) else value, n_rows)

    def result(self) -> Any:
        if self._total is None:
            return super().result()
        return self._gpu.outputs.add(self._number, self._gpu.compute(self._total.float))

    @torch.no_grad()
    def _add(self, value: torch.Tensor, n_rows: int) -> None:
        if self.mode == "avg":
            value = value * float(np.float32(n_rows / self.n_rows))
        self._n_parts += 1
        if self._total is None:
            self._total = value.clone()
            return
        check_same_shape([tuple(self._total.shape), tuple(value.shape)], self.what, str(self.mode))
        if self._n_parts > NARROW_PARTS:
            self._total = self._total.double()
        combine_into(self._total, value, REDUCE_OPS[str(self.mode)], torch)
