"""Makes a test process use PyCUDA on the simulated driver: it calls `use` before anything else."""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep import kernels
from lockstep.memory import cuda


@dataclass(frozen=True)
class Simulation:
    """Where the parts are. folder: what stands for the devices; settings: see driver.c."""

    site: Path
    driver: Path
    kernels: Path
    folder: Path
    settings: dict[str, str]


def use(simulation: Simulation) -> None:
    """Loads the driver before PyCUDA looks for libcuda.so.1; torch sees device memory as host memory."""
    os.environ["CUDA_SIM_FOLDER"] = str(simulation.folder)
    os.environ.update(simulation.settings)
    ctypes.CDLL(str(simulation.driver), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(simulation.site))
    kernels.compiled = lambda name, architecture: simulation.kernels  # type: ignore[assignment]
    cuda.start_torch = lambda device: None
    cuda.as_bytes = host_view


def host_view(block: cuda.CudaBlock, device: torch.device) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * block.n_bytes).from_address(block.pointer)
    buffer.block = block  # type: ignore[attr-defined]  # kept for as long as the tensor
    return torch.from_numpy(np.ctypeslib.as_array(buffer))
