"""In which precision a network computes. Weights and momenta are float32 in the arena whatever is chosen."""

import os
from pathlib import Path
from typing import Literal

import torch

from lockstep.config import Config

_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them on x86 and on ARM


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


def warning(config: Config) -> str:
    """For CPUs: that this processor has no instructions for `precision`, and what that costs; or nothing."""
    if config.precision != "bf16" or not _CPUINFO.exists():
        return ""
    lines = _CPUINFO.read_text().splitlines()
    words = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    if not words or _BF16 & set(words):
        return ""
    times = "1.3" if "avx512f" in words else "5"
    return (
        "precision: bf16: this processor has no instructions for bfloat16: a step may take "
        f"{times} times as long as in fp32"
    )


def image_dtype(config: Config) -> Literal["bfloat16", "float32"]:
    """In which a GPU's kernel hands images to the network."""
    return "bfloat16" if config.precision == "bf16" else "float32"
