"""Installation of Lockstep's CUDA kernels in the layers of a network, as `custom_kernels` asks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.kernels.dropout import DropoutKernel
from lockstep.kernels.lrn import LrnKernel
from lockstep.kernels.pool import PoolKernel
from lockstep.kernels.sgd import SgdKernel
from lockstep.memory.cuda import CudaMemory
from lockstep.network.dropout import SampleDropout
from lockstep.network.low_precision import LowPrecisionWeights
from lockstep.network.lrn import LocalResponseNorm
from lockstep.network.pool import ReluMaxPool

INSTALLED, UNAVAILABLE = "CUDA kernel", "torch, because the CUDA kernel is unavailable"


def install(model: nn.Module, config: Config, memory: CudaMemory, stream: Any) -> dict[str, str]:
    """Install the kernels that `custom_kernels` names in the model's layers.

    A layer computes in torch if its kernel cannot be built for this device.

    Args:
        stream: The stream in which torch computes.

    Returns:
        How each kind of layer is computed.
    """
    layers: dict[str, tuple[Any, Any]] = {
        "lrn": (LocalResponseNorm, LrnKernel),
        "dropout": (SampleDropout, DropoutKernel),
        "pool": (ReluMaxPool, PoolKernel),
    }
    implementations = {}
    for name, (kind, make) in layers.items():
        users = [module for module in model.modules() if isinstance(module, kind)]
        if users:
            implementations[name] = _give(users, name, config, partial(make, memory, stream))
        else:
            implementations[name] = "no such layer"
    return implementations


def install_update(
    weights: LowPrecisionWeights | None, config: Config, memory: CudaMemory, stream: Any
) -> dict[str, str]:
    """Install the kernel of SGD on weights with bfloat16 copies. Arguments are those of `install`.

    Returns:
        How the step is computed, under the key 'sgd'.
    """
    if weights is None or not weights.keeps_gradients:
        return {"sgd": "torch: the CUDA kernel is for sgd with precision: bf16 and trainers that step alone"}
    return {"sgd": _give([weights], "sgd", config, partial(SgdKernel, memory, stream))}


def is_asked(name: str, config: Config) -> bool:
    """Return whether `custom_kernels` allows this kernel."""
    return config.custom_kernels in ("all", name)


def _give(users: Sequence[Any], name: str, config: Config, make: Callable[[], Any]) -> str:
    """Construct one kernel and give it to all its users; return how they compute."""
    if not is_asked(name, config):
        return f"torch, by custom_kernels: {config.custom_kernels}"
    try:
        kernel = make()
    except UserError as error:
        return f"{UNAVAILABLE}: {error}"
    for user in users:
        user.kernel = kernel
    return INSTALLED
