"""In which precision a network computes. Weights and momenta are float32 in the arena whatever is chosen."""

import os
from typing import Literal

import torch
from torch import nn

from lockstep.config import Config


def configure(config: Config) -> None:
    """Sets torch's switches for this process; on CPUs only those of determinism mean anything.

    fp32: IEEE single precision. tf32: products of 10-bit mantissas in the GPU's matrix units, sums in fp32.
    bf16: `autocast` as well. cuDNN tries its algorithms and keeps the fastest, unless runs must repeat.
    """
    products = "tf32" if config.precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS may sum in another order
        torch.use_deterministic_algorithms(True)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """The context of a forward pass. With bf16, convolutions and products take and give bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def image_dtype(config: Config) -> Literal["bfloat16", "float32"]:
    """In which a GPU's kernel hands images to the network."""
    return "bfloat16" if config.precision == "bf16" else "float32"


def keeps_copies(config: Config, model: nn.Module) -> bool:
    """Whether bfloat16 copies of the weights are kept (working.py). A compiler casts inside its kernels."""
    is_float32 = all(value.dtype == torch.float32 for value in model.parameters())
    return config.precision == "bf16" and not config.compile and is_float32
