"""The memory of a shared tensor on one rank: host memory, or a block on the rank's GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.exchange import Op
from lockstep.synk import rows
from lockstep.synk.context import RankContext

if TYPE_CHECKING:
    from lockstep.exchange.transport import Transport
    from lockstep.memory.cuda import CudaBlock
    from lockstep.synk.gpu import RankGpu  # PyCUDA comes with it


class SharedStorage(ABC):
    """The memory of one shared variable on this rank."""

    @abstractmethod
    def store(self, value: np.ndarray) -> torch.Tensor:
        """Return a tensor with this value: on the array's own memory, or a copy on the device.

        It can be trained, too: a parameter on a tensor of inference mode could not.
        """

    @abstractmethod
    def read(self, tensor: torch.Tensor) -> np.ndarray:
        """Return a stored tensor's current value: the same memory, or a copy."""

    @abstractmethod
    def run(self, function: Callable[[], None]) -> None:
        """Call a function that works on the tensors with torch."""

    def all_reduce(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """Reduce all ranks' tensors, which start their blocks and never change in size."""
        raise AssertionError("AllReduceShared reduces host memory")

    def reduce(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """Reduce all ranks' tensors, which lie anywhere on the devices and may change in size."""
        raise AssertionError("AllReduceShared reduces host memory")

    @abstractmethod
    def release(self) -> None:
        """Free memory on devices."""


class HostStorage(SharedStorage):
    """Host memory, which the tensors use directly."""

    @torch.inference_mode(False)
    def store(self, value: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(value)

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        array: np.ndarray = tensor.numpy()
        return array

    def run(self, function: Callable[[], None]) -> None:
        function()

    def release(self) -> None:
        """Do nothing: no device memory is used."""


class DeviceStorage(SharedStorage):
    """A block on the rank's GPU, and its collectives with the other ranks' blocks."""

    def __init__(self, gpu: "RankGpu") -> None:
        self._gpu = gpu
        self._block: CudaBlock | None = None
        self._transport: Transport | None = None

    @torch.inference_mode(False)
    def store(self, value: np.ndarray) -> torch.Tensor:
        if self._block is None or self._block.n_bytes < value.nbytes:
            assert self._transport is None, "a block that other ranks have open must not move"
            if self._block is not None:
                self._block.close()
            self._block = self._gpu.memory.allocate(max(1, value.nbytes), "a shared tensor")
        self._gpu.write(self._block, np.ascontiguousarray(value))
        return self._block.tensor(torch.from_numpy(np.empty(0, value.dtype)).dtype, value.shape)

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        return self._gpu.fetch(tensor)

    def run(self, function: Callable[[], None]) -> None:
        self._gpu.compute(function)

    def all_reduce(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """Reduce over all ranks; `weight` is this rank's weight in the mean, None if equal or another op."""
        assert self._block is not None
        if self._transport is None:
            self._transport = self._gpu.open(self._block, tensor.numel())
        self._gpu.all_reduce(self._transport, tensor, op, weight)

    def reduce(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        self._gpu.compute(tensor.copy_, self._gpu.reducer.reduce(tensor, op, weight))

    def release(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._block is not None:
            self._gpu.stream.synchronize()
            self._block.close()
        self._transport = self._block = None


def make_storage(context: RankContext) -> SharedStorage:
    """Return storage for one variable of this rank."""
    return HostStorage() if context.gpu is None else DeviceStorage(context.gpu)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return a number that changes when torch writes to a tensor; None in inference mode, which has none."""
    return None if tensor.is_inference() else tensor._version


def memory_state(tensor: torch.Tensor) -> Any:
    """Return a value that changes when torch writes to a tensor, and when its `data` is set."""
    if tensor.layout != torch.strided:  # a sparse gradient
        return version_of(tensor)
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride()


def are_plain(tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> bool:
    """Return whether tensors of one dtype have these shapes, and the values in their memory, in order.

    A transposed and a conjugate view have other values. Called with all parameters at every call.
    """
    if tensors and tensors[0].is_complex() and any(map(torch.Tensor.is_conj, tensors)):
        return False
    return list(map(torch.Tensor.size, tensors)) == shapes and all(map(torch.Tensor.is_contiguous, tensors))


def check_dtype(name: str, tensor: torch.Tensor, shared: torch.dtype) -> None:
    """Raise ValueError if a tensor was cast after share(): the other ranks have it in the former dtype."""
    if tensor.dtype != shared:
        raise ValueError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} is {tensor.dtype} now, and was {shared} at "
            "share(). Cast modules and tensors before share()"
        )


def choose_rows(tensor: torch.Tensor, choice: rows.Choice) -> torch.Tensor:
    """Return the chosen rows of a tensor: a view for a slice, a copy for row numbers."""
    if isinstance(choice, slice):
        return tensor[choice]
    return tensor.index_select(0, torch.from_numpy(np.ascontiguousarray(choice)).to(tensor.device))
