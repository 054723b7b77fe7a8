"""The Python wrapper of fold.cu: reductions of several arrays in device memory into several arrays."""

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import kernels
from lockstep.memory.cuda import CudaMemory

if TYPE_CHECKING:  # the exchange lies in a higher package
    from lockstep.exchange import Op, Span

MOST_RANKS = 16  # as in fold.cu
MOST_SOURCES = 64
_THREADS = 256
_FLOATS = 4  # that one thread takes


class ReduceKernel:
    """A kernel that reduces a span of up to 16 float32 arrays in device memory into up to 16 arrays."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        driver = memory.driver
        self._stream = stream
        module = kernels.load(driver, "fold")
        self._kernel_of = cache(lambda op: module.get_function(f"fold_{op}"))
        self._tree_kernel = module.get_function("fold_tree")
        processors = driver.Context.get_device().get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        self._most_blocks = 8 * processors  # fill the device; each thread loops until all is done

    def launch(self, sources: list[int], targets: list[int], span: "Span", op: "Op") -> None:
        """Start the reduction in the stream.

        Args:
            sources: The addresses of element 0 of each array that is read.
            targets: Those of the arrays that are written.
            span: Elements [first, last); `first` must be a multiple of 4.
            op: The reduction.
        """
        self._launch(self._kernel_of(op), _packed(sources), len(sources), targets, span)

    def launch_tree(
        self, sources: list[int], targets: list[int], span: "Span", behind: Iterable[int]
    ) -> None:
        """Start the sum of up to MOST_SOURCES arrays along a tree.

        Args:
            sources: As of `launch`.
            targets: As of `launch`.
            span: As of `launch`.
            behind: The number of sums to make after each source, from `exchange.tree.sums_behind`.
        """
        program = np.zeros(MOST_SOURCES, np.uint8)
        program[: len(sources)] = list(behind)
        arrays = np.concatenate([_packed(sources, MOST_SOURCES), program.view(np.uint64)])
        self._launch(self._tree_kernel, arrays, len(sources), targets, span)

    def _launch(
        self, kernel: Any, arrays: np.ndarray, n_sources: int, targets: list[int], span: "Span"
    ) -> None:
        first, last = span
        assert first % _FLOATS == 0
        if first == last or not targets:
            return
        kernel(
            arrays,  # both arrays first: PyCUDA does not align them
            _packed(targets),
            np.int32(n_sources),
            np.int32(len(targets)),
            np.uint64(first),
            np.uint64(last),
            block=(_THREADS, 1, 1),
            grid=(max(1, min(-(-(last - first) // (_FLOATS * _THREADS)), self._most_blocks)), 1),
            stream=self._stream,
        )


def _packed(addresses: list[int], size: int = MOST_RANKS) -> np.ndarray:
    assert len(addresses) <= size
    pointers = np.zeros(size, np.uint64)
    pointers[: len(addresses)] = addresses
    return pointers
