"""The Python wrapper of sgd.cu: SGD on weights with bfloat16 gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import kernels
from lockstep.kernels.common import THREADS, most_blocks
from lockstep.memory.cuda import CudaMemory

if TYPE_CHECKING:  # the weights lie in a higher package
    from lockstep.network.low_precision import Update

_MOST_TENSORS = 48  # as in sgd.cu
_NUMBERS = 4  # elements that one thread takes at a time
_TENSOR = np.dtype(  # struct Tensor of sgd.cu
    [(name, "u8") for name in ("weight", "momenta", "gradient", "copy", "n")]
    + [(name, "f8") for name in ("rate", "decay")]
    + [(name, "u4") for name in ("first_block", "n_blocks")]
)


class SgdKernel:
    """SGD with momentum on float32 weights with bfloat16 gradients, for many tensors in one launch.

    Args:
        stream: The stream in which torch computes.
    """

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        self._function, self._stream = kernels.load(memory.driver, "sgd").get_function("sgd"), stream
        self._most_blocks = most_blocks(memory)

    def step(self, updates: "Sequence[Update]", momentum: float, nesterov: bool) -> None:
        """Update all tensors, and write the copies that are asked for."""
        for first in range(0, len(updates), _MOST_TENSORS):
            some = updates[first : first + _MOST_TENSORS]
            rows = np.zeros(_MOST_TENSORS, _TENSOR)
            blocks = [self._blocks_of(len(each.weight)) for each in some]
            firsts = [sum(blocks[:number]) for number in range(len(some))]
            parts = zip(some, firsts, blocks, strict=True)
            rows[: len(some)] = [(*_row(each), *span) for each, *span in parts]
            numbers = np.float64(momentum), np.int32(nesterov), np.int32(len(some))
            grid, block = (sum(blocks), 1), (THREADS, 1, 1)
            self._function(rows, *numbers, grid=grid, block=block, stream=self._stream)

    def _blocks_of(self, n: int) -> int:
        """Return the number of blocks for a tensor of n numbers."""
        return max(1, min(-(-n // (_NUMBERS * THREADS)), self._most_blocks))


def _row(update: "Update") -> tuple[float, ...]:
    """Return the pointers and numbers of one tensor as struct Tensor of sgd.cu has them."""
    if update.gradient.data_ptr() % (_NUMBERS * update.gradient.element_size()):
        update.gradient = update.gradient.clone()  # an unaligned view
    momenta = 0 if update.momenta is None else update.momenta.data_ptr()
    copy = 0 if update.copy is None else update.copy.data_ptr()
    pointers = update.weight.data_ptr(), momenta, update.gradient.data_ptr(), copy
    return *pointers, len(update.weight), update.rate, update.decay
