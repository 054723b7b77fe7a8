"""Which devices there are, and which of those that were asked for can be used.

Runs in the launcher, which never touches CUDA: the NVIDIA driver is asked through its own program,
`nvidia-smi`, so that no CUDA context is made in a process that later starts others.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lockstep.errors import UserError

_GPU = re.compile(r"(?:gpu|cuda:)(\d+)")


def normalise(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Writes every device as 'cpu' or 'cuda:<n>'. Raises UserError for anything else, or for a mixture."""
    names = tuple(_normalise_one(device) for device in devices)
    if "cpu" in names and len(set(names)) > 1:
        raise UserError(f"devices: a run is on CPUs or on GPUs, not on both: {', '.join(names)}")
    return names


def _normalise_one(device: str) -> str:
    if device == "cpu":
        return device
    match = _GPU.fullmatch(device)
    if not match:
        raise UserError(f"devices: {device!r} is not a device; write cpu, cuda:0 or gpu0")
    return f"cuda:{int(match.group(1))}"


def choose() -> tuple[tuple[str, ...], str]:
    """The devices of a run that names none, and why they were chosen."""
    devices = ("cpu",) * min(2, count_cores())
    n_gpus = count_gpus()
    if n_gpus:
        return devices, f"{n_gpus} NVIDIA GPU(s) seen, but this version trains on the CPU only"
    return devices, "no NVIDIA GPU here"


def check(devices: tuple[str, ...]) -> None:
    """Raises UserError when a device is not there or can't be used by this version."""
    gpus = [device for device in devices if device != "cpu"]
    if not gpus:
        return
    n_gpus = count_gpus()
    for gpu in gpus:
        if int(gpu.removeprefix("cuda:")) >= n_gpus:
            raise UserError(
                f"devices: {gpu} is not there: this machine has {n_gpus} NVIDIA GPU(s); "
                "use --spec spec_cpu.yaml, or name a device that exists"
            )
    raise UserError(
        f"devices: {gpus[0]} is there, but this version has no exchange and loading on GPUs yet; "
        "use --spec spec_cpu.yaml"
    )


def count_gpus() -> int:
    """NVIDIA GPUs that the driver shows; 0 where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None or not Path("/proc/driver/nvidia").exists():
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def count_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))
