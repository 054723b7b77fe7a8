"""The record of the machine: the facts of benchmarks/measure.py, and the driver's facts about the GPUs."""

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks import measure
from lockstep.backends.gpus import list_gpus
from lockstep.errors import UserError

_FIELDS = (
    "name,driver_version,pci.bus_id,memory.total,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,"
    "power.limit,temperature.gpu,compute_mode"
)
_ANSWER_SECONDS = 30.0


def facts() -> dict[str, object]:
    """GPUs, driver, clocks before anything ran, processor, versions, date, commit."""
    return {
        **measure.machine(),
        "gpus": gpus(),
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or "none",
        "nccl": str(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else "none",
        "pycuda": _version("pycuda"),
        "torchvision": _version("torchvision"),
    }


def gpus() -> list[dict[str, str]]:
    """The GPUs with their clocks and limits; without nvidia-smi what the driver's library says of them."""
    if shutil.which("nvidia-smi") is not None:
        return query(_FIELDS)
    try:
        return [
            {
                "name": gpu.name,
                "driver_version": gpu.driver,
                "pci.bus_id": gpu.pci_bus_id,
                "memory.total": f"{gpu.memory_mib} MiB",
                "compute_mode": gpu.mode,
            }
            for gpu in list_gpus()
        ]
    except UserError as error:
        return [{"problem": str(error)}]


def query(fields: str) -> list[dict[str, str]]:
    """Return what nvidia-smi says, a dictionary a GPU, or why it says nothing. Never fail."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [{"problem": str(error)}]
    if done.returncode:
        return [{"problem": (done.stdout + done.stderr).strip()}]
    names = fields.split(",")
    lines = [line.split(",") for line in done.stdout.splitlines()]
    return [dict(zip(names, (value.strip() for value in line), strict=False)) for line in lines]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
