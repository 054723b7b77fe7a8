"""Folds of what lies on the ranks' GPUs, but in no block that others can open: single tensors, and outputs.

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.exchange import Op
from lockstep.synk.folded import Folded
from lockstep.synk.results import Kept, check_same_shape

if TYPE_CHECKING:
    from lockstep.exchange.transport import Transport
    from lockstep.memory.cuda import CudaBlock
    from lockstep.synk.gpu import Gpu

LARGE_BYTES = 1 << 20  # below, copying to host memory takes less than one more command to the ranks


class Folder:
    """A block of every rank's, all of one size, that arrays are copied into to be folded there."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self._block: CudaBlock | None = None
        self._transport: Transport | None = None
        self._n_elements = 0

    def fold(self, tensor: torch.Tensor, op: Op, weight: float | None) -> torch.Tensor:
        """The fold of all ranks' float32 tensors, which have one shape; it is there until the next one.

        All ranks call it together. weight: this rank's share of the mean; None where all have equal ones.
        """
        if tensor.numel() > self._n_elements:
            self._grow(tensor.numel())
        if self._block is None or self._transport is None:
            return tensor  # it has no elements
        found = self._block.tensor(torch.float32, tuple(tensor.shape))
        self._gpu.compute(found.copy_, tensor)
        self._gpu.all_reduce(self._transport, found, op, weight)
        return found

    def close(self) -> None:
        """All ranks together."""
        if self._transport is not None:
            self._transport.close()
        if self._block is not None:
            self._gpu.stream.synchronize()
            self._block.close()
        self._transport, self._block, self._n_elements = None, None, 0

    def _grow(self, n_elements: int) -> None:
        self.close()
        self._block = self._gpu.memory.allocate(4 * n_elements, "a fold on the GPU")
        self._transport = self._gpu.open(self._block, n_elements)
        self._n_elements = n_elements


class KeptOutputs:
    """Outputs of the last call that have stayed on the GPU, by number."""

    def __init__(self, gpu: "Gpu", folder: Folder) -> None:
        self._gpu, self._folder = gpu, folder
        self._tensors: dict[int, torch.Tensor] = {}

    def suits(self, value: Any) -> bool:
        """Whether an output is better folded here than in host memory."""
        return torch.is_tensor(value) and value.dtype == torch.float32 and value.nbytes >= LARGE_BYTES

    def folded(self, number: int, otherwise: Folded) -> "GpuFolded":
        """Of an output's parts, on the GPU as far as they suit; otherwise: of those that do not."""
        return GpuFolded(self._gpu, number, otherwise)

    def add(self, number: int, value: torch.Tensor) -> Kept:
        self._tensors[number] = value.detach()
        return Kept(tuple(value.shape))

    def fold(self, number: int, op: Op, weight: float | None) -> torch.Tensor:
        return self._folder.fold(self._tensors.pop(number), op, weight)

    def fetch(self, number: int) -> np.ndarray:
        return self._gpu.fetch(self._tensors.pop(number))

    def clear(self) -> None:
        self._tensors.clear()


_COMBINE: dict[str, Any] = {
    "avg": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


class GpuFolded(Folded):
    """The parts of output `number`: tensors that stay on the GPU as they come; others as in `host`."""

    def __init__(self, gpu: "Gpu", number: int, host: Folded) -> None:
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
        return super().result() if self._total is None else self._gpu.kept.add(self._number, self._total)

    @torch.no_grad()
    def _add(self, value: torch.Tensor, n_rows: int) -> None:
        if self.mode == "avg":
            value = value * float(np.float32(n_rows / self.n_rows))
        if self._total is None:
            self._total = value.clone()
            return
        check_same_shape([tuple(self._total.shape), tuple(value.shape)], self.what, str(self.mode))
        _COMBINE[str(self.mode)](self._total, value, out=self._total)
