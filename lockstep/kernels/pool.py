"""The Python wrapper of pool.cu: ReLU with max pooling and its gradient."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep import kernels
from lockstep.kernels.common import CHUNK_BYTES, THREADS, fits_chunks, most_blocks, prepared
from lockstep.memory.cuda import CudaMemory

if TYPE_CHECKING:  # the layer lies in a higher package
    from lockstep.network.layers import ReluMaxPool

_MOST_NUMBERS = 2**31  # pool.cu counts a tensor's numbers in 32 bits
_MOST_PLACES = 255  # places of a window; a byte holds one of them or "none"
_PIXELS = 32  # pixels over which one thread of pool.cu sums a bias's gradient


class PoolKernel:
    """Both directions of ReLU with max pooling.

    Args:
        stream: The stream in which torch computes.

    Attributes:
        adds_biases: Whether `ReluMaxPool.behind` leaves the convolution's bias to this kernel.
    """

    adds_biases = True

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        module, self._stream = kernels.load(memory.driver, "pool"), stream
        self._most_blocks = most_blocks(memory)
        self._forward = prepared(module, "pool_forward", "PPPPIIIIIIII")
        self._backward = prepared(module, "pool_backward", "PPPIIIIIIII")
        self._bias = prepared(module, "pool_bias", "PPPIIII")

    def takes(self, x: torch.Tensor, pool: "ReluMaxPool", bias: torch.Tensor | None = None) -> bool:
        """Return whether the kernel can pool x; otherwise torch does."""
        fits = pool.size**2 <= _MOST_PLACES and pool.size <= min(x.shape[2:])
        aligned = bias is None or (bias.is_contiguous() and bias.data_ptr() % CHUNK_BYTES == 0)
        return fits and aligned and x.numel() < _MOST_NUMBERS and fits_chunks(x)

    def forward(
        self, x: torch.Tensor, pool: "ReluMaxPool", bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y, and each output's place in its window: uint8 of y's shape."""
        batch, channels, rows, columns = x.shape
        out_rows, out_columns = ((n - pool.size) // pool.stride + 1 for n in (rows, columns))
        shape, layout = (batch, channels, out_rows, out_columns), torch.channels_last
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
        places = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=layout)
        form = _form(x.shape, y, pool)
        self._launch(self._forward[x.dtype], [x, bias, y, places], y, *form)
        return y, places

    def backward(
        self, gradient: torch.Tensor, places: torch.Tensor, shape: torch.Size, pool: "ReluMaxPool"
    ) -> torch.Tensor:
        """Return the gradient of x, of this shape, from the output's gradient, which is channels last."""
        layout = torch.channels_last  # in `empty`, because a later change of format would copy
        to_x = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=layout)
        form = _form(shape, gradient, pool)
        self._launch(self._backward[to_x.dtype], [gradient, places, to_x], to_x, *form)
        return to_x

    def bias_gradient(self, gradient: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return float32 (part, channel), whose sum over the parts is the bias's gradient."""
        n_channels = gradient.shape[1]
        n_pixels = gradient.numel() // n_channels
        n_parts = -(-n_pixels // _PIXELS)
        sums = torch.empty((n_parts, n_channels), device=gradient.device)
        chunk = CHUNK_BYTES // gradient.element_size()
        numbers = n_channels // chunk, n_pixels, n_parts
        self._launch(self._bias[gradient.dtype], [gradient, places, sums], sums, chunk, *numbers)
        return sums

    def _launch(
        self,
        function: Any,
        tensors: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        chunk: int,
        *numbers: int,
    ) -> None:
        """Launch with one thread per chunk of `chunk` numbers of `out`, which is one of the tensors."""
        n = out.numel() // chunk
        grid, block = (min(-(-n // THREADS), self._most_blocks), 1), (THREADS, 1, 1)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        function.prepared_async_call(grid, block, self._stream, *pointers, n, *numbers)


def _form(shape: torch.Size, pooled: torch.Tensor, pool: "ReluMaxPool") -> tuple[int, ...]:
    """Return the numbers in a chunk, then pool.cu's Form, for images of this shape."""
    chunk = CHUNK_BYTES // pooled.element_size()
    return chunk, *shape[2:], *pooled.shape[2:], shape[1] // chunk, pool.size, pool.stride
