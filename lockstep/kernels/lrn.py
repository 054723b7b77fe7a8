"""The Python wrapper of lrn.cu: local response normalisation and its gradient."""

from typing import TYPE_CHECKING, Any

import torch

from lockstep import kernels
from lockstep.kernels.common import CHUNK_BYTES, THREADS, fits_chunks, most_blocks, prepared
from lockstep.memory.cuda import CudaMemory

if TYPE_CHECKING:  # the layer lies in a higher package
    from lockstep.network.layers import LocalResponseNorm

_MOST_NEIGHBOURS = 5  # as in lrn.cu


class LrnKernel:
    """Both directions of local response normalisation.

    Args:
        stream: The stream in which torch computes.
    """

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        module, self._stream = kernels.load(memory.driver, "lrn"), stream
        self._most_blocks = most_blocks(memory)
        self._forward = prepared(module, "lrn_forward", "PPQiifff")
        self._backward = prepared(module, "lrn_backward", "PPPQiifff")

    def takes(self, x: torch.Tensor, norm: "LocalResponseNorm") -> bool:
        """Return whether the kernel can normalise x; otherwise torch does."""
        if norm.n > _MOST_NEIGHBOURS:
            return False
        return fits_chunks(x)

    def forward(self, x: torch.Tensor, norm: "LocalResponseNorm") -> torch.Tensor:
        """Return the normalised x."""
        y = torch.empty_like(x)
        self._launch(self._forward[x.dtype], [x, y], norm)
        return y

    def backward(self, x: torch.Tensor, gradient: torch.Tensor, norm: "LocalResponseNorm") -> torch.Tensor:
        """Return the gradient of x from the output's gradient, which is channels last and of x's dtype."""
        to_x = torch.empty_like(x)
        self._launch(self._backward[x.dtype], [x, gradient, to_x], norm)
        return to_x

    def _launch(self, function: Any, tensors: list[torch.Tensor], norm: "LocalResponseNorm") -> None:
        x = tensors[0]
        chunk = CHUNK_BYTES // x.element_size()
        n = x.numel() // chunk
        grid = (min(-(-n // THREADS), self._most_blocks), 1)
        form = norm.n, norm.k, norm.alpha, norm.beta
        pointers = [tensor.data_ptr() for tensor in tensors]
        block = (THREADS, 1, 1)
        function.prepared_async_call(grid, block, self._stream, *pointers, n, x.shape[1] // chunk, *form)
