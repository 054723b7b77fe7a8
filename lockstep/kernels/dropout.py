"""The Python wrapper of dropout.cu: dropout by sample, and its gradient."""

from typing import Any

import torch

from lockstep import kernels
from lockstep.kernels.common import DTYPES, THREADS, prepared
from lockstep.memory.cuda import CudaMemory

_MOST_ROWS = 65_535  # rows of a grid


class DropoutKernel:
    """Dropout by sample. Its gradient is the same function of the output's gradient.

    Args:
        stream: The stream in which torch computes.
    """

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        self._stream = stream
        self._functions = prepared(kernels.load(memory.driver, "dropout"), "dropout", "PPPiiifi")

    def takes(self, x: torch.Tensor, keys: torch.Tensor) -> bool:
        """Return whether the kernel can take x; otherwise torch applies the mask."""
        return x.dtype in DTYPES and x.is_contiguous() and 0 < len(keys) <= _MOST_ROWS and x.numel() > 0

    def apply(
        self, x: torch.Tensor, keys: torch.Tensor, place: tuple[int, int], least: int, factor: float
    ) -> torch.Tensor:
        """Return x times `factor` where the mask keeps it, and zero elsewhere.

        Args:
            keys: int32 (batch,), one for each sample.
            place: Number of the layer, and of its call in this step.
            least: The smallest hash of a retained feature.
        """
        out = torch.empty_like(x)
        n_features = x.numel() // len(keys)
        grid = (-(-n_features // THREADS), len(keys))
        pointers = x.data_ptr(), out.data_ptr(), keys.data_ptr()
        block, numbers = (THREADS, 1, 1), (*place, least, factor, n_features)
        self._functions[x.dtype].prepared_async_call(grid, block, self._stream, *pointers, *numbers)
        return out
