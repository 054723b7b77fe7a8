"""Common parts of the Python wrappers of CUDA kernels. Each wrapper lies beside its .cu file.

Kernels run in the stream in which torch computes. Each has an equivalent in torch, which CPUs use, and which
serves tensors that the kernel does not take. Kernels and their equivalents are compared on the tests'
simulated driver and, where there is one, on a GPU.
"""

from typing import Any

import torch

from lockstep.memory.cuda import CudaMemory

THREADS = 256  # of a block
CHUNK_BYTES = 16  # one thread's channels in lrn.cu and pool.cu
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def fits_chunks(x: torch.Tensor) -> bool:
    """Return whether a kernel can take x in chunks of 16 bytes: aligned, channels last, of DTYPES."""
    if x.dtype not in DTYPES or x.data_ptr() % CHUNK_BYTES:
        return False
    whole = x.shape[1] * x.element_size() % CHUNK_BYTES == 0
    return whole and x.is_contiguous(memory_format=torch.channels_last) and x.numel() > 0


def most_blocks(memory: CudaMemory) -> int:
    """Return the number of blocks that keeps every multiprocessor busy."""
    processors = memory.driver.device_attribute.MULTIPROCESSOR_COUNT
    return int(16 * memory.driver.Context.get_device().get_attribute(processors))


def prepared(module: Any, name: str, signature: str) -> dict[torch.dtype, Any]:
    """Return a kernel's function for each dtype. PyCUDA keeps the module alive as long as its functions."""
    functions = {dtype: module.get_function(f"{name}_{text}") for dtype, text in DTYPES.items()}
    for function in functions.values():
        function.prepare(signature)
    return functions
