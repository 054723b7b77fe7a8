"""What parts of a network do in kernels of our own on a GPU, launched in the stream in which torch computes.

Each has its plain way in torch, which is taken on CPUs, for what the kernel does not take, and where
`kernels` in the configuration does not name it. Checked against that on the simulated driver of the tests;
not run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep import kernels
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.memory.cuda import CudaMemory
from lockstep.network.dropout import SampleDropout
from lockstep.network.lrn import LocalResponseNorm
from lockstep.network.pool import ReluMaxPool
from lockstep.network.working import Update, WorkingWeights

_THREADS = 256
_CHUNK_BYTES = 16  # that a thread of lrn.cu or pool.cu takes
_MOST_NEIGHBOURS = 5  # as in lrn.cu
_MOST_ROWS = 65_535  # of a grid
_MOST_NUMBERS = 2**31  # of a tensor, which pool.cu counts in 32 bits
_MOST_PLACES = 255  # of a window, in a byte with room for none of them
_MOST_TENSORS = 64  # as in sgd.cu
_NUMBERS = 4  # that a thread of sgd.cu takes at a time
_TENSOR = np.dtype(
    [(name, "u8") for name in ("weight", "momenta", "gradient", "copy", "n")]
    + [(name, "f8") for name in ("rate", "decay")]
)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
OURS, NOT_HAD = "our kernel", "torch, because our kernel can't be had"


def install(model: nn.Module, config: Config, memory: CudaMemory, stream: Any) -> dict[str, str]:
    """Makes the model's layers use the kernels that `kernels` asks for. Returns which way each goes.

    A kernel that can't be built for this device is done without.
    """
    layers: dict[str, tuple[Any, Any]] = {
        "lrn": (LocalResponseNorm, LrnKernel),
        "dropout": (SampleDropout, DropoutKernel),
        "pool": (ReluMaxPool, PoolKernel),
    }
    ways = {}
    for name, (kind, make) in layers.items():
        found = [module for module in model.modules() if isinstance(module, kind)]
        if found:
            ways[name] = _give(found, name, config, partial(make, memory, stream))
        else:
            ways[name] = "no such layer"
    return ways


def install_update(
    working: WorkingWeights | None, config: Config, memory: CudaMemory, stream: Any
) -> dict[str, str]:
    """The same for SGD on weights with bfloat16 copies."""
    if working is None or not working.keeps_gradients:
        return {
            "sgd": "torch: our kernel is for sgd with precision: bf16, where each trainer takes its own step"
        }
    return {"sgd": _give([working], "sgd", config, partial(SgdKernel, memory, stream))}


def is_asked(name: str, config: Config) -> bool:
    """Whether `kernels` leaves this to a kernel of ours."""
    return config.kernels in ("all", name)


def _give(users: Sequence[Any], name: str, config: Config, make: Callable[[], Any]) -> str:
    """One kernel to all that use it."""
    if not is_asked(name, config):
        return f"torch, by kernels: {config.kernels}"
    try:
        kernel = make()
    except UserError as error:
        return f"{NOT_HAD}: {error}"
    for user in users:
        user.kernel = kernel
    return OURS


class LrnKernel:
    """lockstep/kernels/lrn.cu. stream: in which torch computes."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        module, self._stream = kernels.load(memory.driver, "lrn"), stream
        self._most_blocks = _most_blocks(memory)
        self._forward = _prepared(module, "lrn_forward", "PPQiifff")
        self._backward = _prepared(module, "lrn_backward", "PPPQiifff")

    def takes(self, x: torch.Tensor, norm: LocalResponseNorm) -> bool:
        if norm.n > _MOST_NEIGHBOURS:
            return False
        return _in_chunks(x)

    def forward(self, x: torch.Tensor, norm: LocalResponseNorm) -> torch.Tensor:
        made = torch.empty_like(x)
        self._launch(self._forward[x.dtype], [x, made], norm)
        return made

    def backward(self, x: torch.Tensor, gradient: torch.Tensor, norm: LocalResponseNorm) -> torch.Tensor:
        made = torch.empty_like(x)
        self._launch(self._backward[x.dtype], [x, gradient, made], norm)
        return made

    def _launch(self, function: Any, tensors: list[torch.Tensor], norm: LocalResponseNorm) -> None:
        x = tensors[0]
        chunk = _CHUNK_BYTES // x.element_size()
        n = x.numel() // chunk
        grid = (min(-(-n // _THREADS), self._most_blocks), 1)
        form = norm.n, norm.k, norm.alpha, norm.beta
        pointers = [tensor.data_ptr() for tensor in tensors]
        block = (_THREADS, 1, 1)
        function.prepared_async_call(grid, block, self._stream, *pointers, n, x.shape[1] // chunk, *form)


class PoolKernel:
    """lockstep/kernels/pool.cu. stream: in which torch computes."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        module, self._stream = kernels.load(memory.driver, "pool"), stream
        self._most_blocks = _most_blocks(memory)
        self._forward = _prepared(module, "pool_forward", "PPPIIIIIIII")
        self._backward = _prepared(module, "pool_backward", "PPPIIIIIIII")

    def takes(self, x: torch.Tensor, pool: ReluMaxPool) -> bool:
        fits = pool.size**2 <= _MOST_PLACES and pool.size <= min(x.shape[2:])
        return fits and x.numel() < _MOST_NUMBERS and _in_chunks(x)

    def forward(self, x: torch.Tensor, pool: ReluMaxPool) -> tuple[torch.Tensor, torch.Tensor]:
        batch, channels, rows, columns = x.shape
        out_rows, out_columns = ((n - pool.size) // pool.stride + 1 for n in (rows, columns))
        shape, layout = (batch, channels, out_rows, out_columns), torch.channels_last
        made = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
        places = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=layout)
        self._launch(self._forward[x.dtype], [x, made, places], made, x.shape, made.shape, pool)
        return made, places

    def backward(
        self, gradient: torch.Tensor, places: torch.Tensor, shape: torch.Size, pool: ReluMaxPool
    ) -> torch.Tensor:
        made = gradient.new_empty(shape).contiguous(memory_format=torch.channels_last)
        tensors = [gradient, places, made]
        self._launch(self._backward[made.dtype], tensors, made, shape, gradient.shape, pool)
        return made

    def _launch(
        self,
        function: Any,
        tensors: list[torch.Tensor],
        made: torch.Tensor,
        shape: torch.Size,
        out: torch.Size,
        pool: ReluMaxPool,
    ) -> None:
        """made: that of `tensors` of which each thread makes a chunk."""
        chunk = _CHUNK_BYTES // made.element_size()
        n = made.numel() // chunk
        grid, block = (min(-(-n // _THREADS), self._most_blocks), 1), (_THREADS, 1, 1)
        form = *shape[2:], *out[2:], shape[1] // chunk, pool.size, pool.stride
        pointers = [tensor.data_ptr() for tensor in tensors]
        function.prepared_async_call(grid, block, self._stream, *pointers, n, *form)


class DropoutKernel:
    """lockstep/kernels/dropout.cu. stream: in which torch computes."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        self._stream = stream
        self._functions = _prepared(kernels.load(memory.driver, "dropout"), "dropout", "PPPiiifi")

    def takes(self, x: torch.Tensor, keys: torch.Tensor) -> bool:
        return x.dtype in _NAMES and x.is_contiguous() and 0 < len(keys) <= _MOST_ROWS and x.numel() > 0

    def apply(
        self, x: torch.Tensor, keys: torch.Tensor, place: tuple[int, int], least: int, factor: float
    ) -> torch.Tensor:
        """x where its mask keeps it, times `factor`; zero elsewhere. least: the smallest hash that stays."""
        made = torch.empty_like(x)
        n_features = x.numel() // len(keys)
        grid = (-(-n_features // _THREADS), len(keys))
        pointers = x.data_ptr(), made.data_ptr(), keys.data_ptr()
        block, numbers = (_THREADS, 1, 1), (*place, least, factor, n_features)
        self._functions[x.dtype].prepared_async_call(grid, block, self._stream, *pointers, *numbers)
        return made


class SgdKernel:
    """lockstep/kernels/sgd.cu. stream: in which torch computes."""

    def __init__(self, memory: CudaMemory, stream: Any) -> None:
        self._function, self._stream = kernels.load(memory.driver, "sgd").get_function("sgd"), stream
        self._most_blocks = _most_blocks(memory)

    def step(self, updates: Sequence[Update], momentum: float, nesterov: bool) -> None:
        for first in range(0, len(updates), _MOST_TENSORS):
            some = updates[first : first + _MOST_TENSORS]
            rows = np.zeros(_MOST_TENSORS, _TENSOR)
            rows[: len(some)] = [_row(each) for each in some]
            widest = max(len(each.weight) for each in some)
            blocks = max(1, min(-(-widest // (_NUMBERS * _THREADS)), self._most_blocks))
            numbers = np.float64(momentum), np.int32(nesterov)
            grid, block = (blocks, len(some)), (_THREADS, 1, 1)
            self._function(rows, *numbers, grid=grid, block=block, stream=self._stream)


def _row(update: Update) -> tuple[float, ...]:
    if update.gradient.data_ptr() % (_NUMBERS * update.gradient.element_size()):
        update.gradient = update.gradient.clone()  # a view from somewhere in a tensor
    momenta = 0 if update.momenta is None else update.momenta.data_ptr()
    copy = 0 if update.copy is None else update.copy.data_ptr()
    pointers = update.weight.data_ptr(), momenta, update.gradient.data_ptr(), copy
    return *pointers, len(update.weight), update.rate, update.decay


def _in_chunks(x: torch.Tensor) -> bool:
    """Whether its channels can be taken 16 bytes at a time, in a precision that the kernels have."""
    if x.dtype not in _NAMES or x.data_ptr() % _CHUNK_BYTES:
        return False
    whole = x.shape[1] * x.element_size() % _CHUNK_BYTES == 0
    return whole and x.is_contiguous(memory_format=torch.channels_last) and x.numel() > 0


def _most_blocks(memory: CudaMemory) -> int:
    """As many as keep every multiprocessor busy."""
    processors = memory.driver.device_attribute.MULTIPROCESSOR_COUNT
    return int(16 * memory.driver.Context.get_device().get_attribute(processors))


def _prepared(module: Any, name: str, signature: str) -> dict[torch.dtype, Any]:
    """The kernel for each dtype; PyCUDA keeps the module for as long as one of its functions."""
    functions = {dtype: module.get_function(f"{name}_{text}") for dtype, text in _NAMES.items()}
    for function in functions.values():
        function.prepare(signature)
    return functions
