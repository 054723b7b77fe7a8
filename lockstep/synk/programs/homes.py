"""Where a rank's shared tensors lie: in host memory that all ranks map, or on this rank's GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.exchange import Op

if TYPE_CHECKING:
    from lockstep.exchange.transport import Transport
    from lockstep.memory.cuda import CudaBlock
    from lockstep.synk.gpu import Gpu


class Home(ABC):
    """The memory of one shared variable in this rank."""

    @abstractmethod
    def hold(self, value: np.ndarray) -> torch.Tensor:
        """A tensor that has this value from now on: on the array's own memory, or a copy on the device."""

    @abstractmethod
    def read(self, tensor: torch.Tensor) -> np.ndarray:
        """What `hold` has given, as it is now: the same memory, or a copy."""

    @abstractmethod
    def run(self, function: Callable[[], None]) -> None:
        """Calls what works with torch on the tensors."""

    def all_reduce(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """Folds all ranks' tensors, which begin their blocks, and always have this size."""
        raise AssertionError("host memory is folded by AllReduce itself")

    def fold(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        """The same for tensors that lie anywhere on the devices, and may change in size."""
        raise AssertionError("host memory is folded by AllReduce itself")

    @abstractmethod
    def leave(self) -> None:
        """Gives up devices' memory."""


class HostHome(Home):
    """Host memory: all is where it is."""

    def hold(self, value: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(value)

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        found: np.ndarray = tensor.numpy()
        return found

    def run(self, function: Callable[[], None]) -> None:
        function()

    def leave(self) -> None:
        """There is none."""


class GpuHome(Home):
    """A block on the rank's GPU, and its collectives with the others' blocks."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self._block: CudaBlock | None = None
        self._transport: Transport | None = None

    def hold(self, value: np.ndarray) -> torch.Tensor:
        if self._block is None or self._block.n_bytes < value.nbytes:
            assert self._transport is None, "what others have open stays where it is"
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
        """weight: this rank's share of the mean; None where they are equal, or for another op."""
        assert self._block is not None
        if self._transport is None:
            self._transport = self._gpu.open(self._block, tensor.numel())
        self._gpu.all_reduce(self._transport, tensor, op, weight)

    def fold(self, tensor: torch.Tensor, op: Op, weight: float | None) -> None:
        self._gpu.compute(tensor.copy_, self._gpu.folder.fold(tensor, op, weight))

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._block is not None:
            self._gpu.stream.synchronize()
            self._block.close()
        self._transport = self._block = None


def make_home(here: Any) -> Home:
    """A home for one variable of this rank."""
    return HostHome() if here.gpu is None else GpuHome(here.gpu)
