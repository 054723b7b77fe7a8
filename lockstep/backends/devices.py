"""Which devices there are, and which of those that were asked for can be used.

Runs in the launcher, which never touches CUDA and never imports torch or PyCUDA: it looks at what is
installed, and asks the driver by `lockstep/backends/gpus.py`.
"""

import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lockstep.backends.gpus import Gpu, list_gpus, visible
from lockstep.config import Config
from lockstep.errors import UserError

# What tells the Linux inside Windows (WSL 2) from others: its kernel's name, and its way to the GPU.
KERNEL_VERSION = Path("/proc/version")
WINDOWS_GPU = Path("/dev/dxg")
_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them on x86 and on ARM
_GPU = re.compile(r"(?:gpu|cuda:)(\d+)")
_ON_CPU = "to train on the CPU: --spec spec_cpu.yaml"
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True")


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


def on_gpus(devices: Iterable[object]) -> bool:
    """Whether any of these devices, torch's or names as `normalise` writes them, is a GPU."""
    return any(str(device).partition(":")[0] != "cpu" for device in devices)


def choose() -> tuple[tuple[str, ...], str]:
    """The devices of a run that names none, and why: all visible GPUs if they can be used, else CPUs."""
    cpus = ("cpu",) * min(2, count_cores())
    try:
        gpus, shown = _look()
    except UserError as error:
        return cpus, f"{error}; training on the CPU"
    obstacle = _find_obstacle(shown) if shown else f"{_setting_text()} hides what is here"
    if obstacle:
        return cpus, f"{_count(gpus)} here, but {obstacle}; training on the CPU"
    names = tuple(f"cuda:{number}" for number in range(len(shown)))
    listing = ", ".join(f"{name} ({gpu})" for name, gpu in zip(names, shown, strict=True))
    return names, f"all visible GPUs, with driver {shown[0].driver}: {listing}"


def check(devices: tuple[str, ...], otherwise: str = _ON_CPU) -> None:
    """Raises UserError when a device is not there or can't be used. devices: as `normalise` writes them.

    otherwise: what to do without it.
    """
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    if not numbers:
        return
    refused = f"devices: {', '.join(devices)} can't be used"
    try:
        gpus, shown = _look()
    except UserError as error:
        raise UserError(f"{refused}: {error}; {otherwise}") from error
    if max(numbers) >= len(shown):
        hidden = f", and {_setting_text()} shows {len(shown)}" if max(numbers) < len(gpus) else ""
        raise UserError(
            f"devices: cuda:{max(numbers)} is not there: {_count(gpus)} here{hidden}; {otherwise}"
        )
    obstacle = _find_obstacle(shown)
    if obstacle:
        raise UserError(f"{refused}: {obstacle}; {otherwise}")


def notices(devices: tuple[str, ...]) -> list[str]:
    """What a user of these devices should know, and need not change."""
    if not on_gpus(devices):
        return []
    found = []
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if _EXPANDABLE.search(os.environ.get(key, "")):
            found.append(
                f"{key} sets expandable_segments:True, which can't be shared between processes; harmless "
                "here, because PyCUDA allocates what is shared"
            )
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if order != "PCI_BUS_ID":
        found.append(f"CUDA_DEVICE_ORDER is {order}: if GPUs differ, cuda:0 may not be nvidia-smi's GPU 0")
    return found


def describe(devices: tuple[str, ...]) -> dict[str, str]:
    """The model of each device by its name, and the driver of GPUs, for the record."""
    if not on_gpus(devices):
        return {"cpu": _processor()}
    _, shown = _look()
    numbers = (int(device.removeprefix("cuda:")) for device in devices)
    return {f"cuda:{number}": f"{shown[number].name}, driver {shown[number].driver}" for number in numbers}


def number_gpus_by_place() -> None:
    """Makes processes started from now on number GPUs by place on the PCI bus, as nvidia-smi does.

    By itself CUDA puts the fastest first: cuda:0 would be one GPU to this file and another to a trainer. What
    the user has set stays.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def count_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    for line in _CPUINFO.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # ARM's kernel tells no name


def _look() -> tuple[list[Gpu], list[Gpu]]:
    """All GPUs, and those that CUDA shows, in its order. Raises UserError as `list_gpus` and `visible` do."""
    gpus = list_gpus()
    return gpus, visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _find_obstacle(shown: list[Gpu]) -> str:
    """Why the visible GPUs can't be trained on, and the remedy; empty where they can.

    All of them count, used or not: a process that sees a MIG instance sees no other GPU (NVIDIA's MIG user
    guide, "CUDA Device Enumeration").
    """
    if _is_wsl():
        return "this is Linux inside Windows (WSL), where CUDA IPC does not work"
    for number, gpu in enumerate(shown):
        if gpu.mig:
            return (
                f"cuda:{number} ({gpu}) is in MIG mode, and CUDA IPC does not work across MIG instances: "
                f"turn it off (nvidia-smi -i {gpu.index} -mig 0), or hide this GPU by CUDA_VISIBLE_DEVICES"
            )
        if gpu.mode == "Prohibited":
            return (
                f"cuda:{number} ({gpu}) is in compute mode Prohibited: "
                f"nvidia-smi -i {gpu.index} -c DEFAULT lets processes use it"
            )
    if find_spec("pycuda") is None:
        return "PyCUDA is not installed: tools/install_pycuda.sh builds it (see docs/install.md)"
    torch_version = version("torch")
    if torch_version.endswith("+cpu"):
        # Forced, because pip takes 2.13.0+cpu for the 2.13.0 that is asked for
        install = "pip install --force-reinstall -c constraints.txt torch"
        return f"torch {torch_version} is a build without CUDA: {install} (see docs/install.md)"
    return ""


def check_sharing(config: Config) -> None:
    """Raises UserError where several processes of a run need a GPU that lets in one only.

    A loader beside its trainer is a second process, unless the trainer uploads; so is a second trainer on the
    same GPU. With NVIDIA's multi-process service (MPS) all are clients of one.
    """
    users = Counter(config.devices * (2 if config.para_load and config.upload != "trainer" else 1))
    shared = [device for device, number in users.items() if number > 1 and device != "cpu"]
    if not shared or _has_mps():
        return
    _, shown = _look()
    for device in shared:
        gpu = shown[int(device.removeprefix("cuda:"))]
        if gpu.mode == "Exclusive_Process":
            loader = ", or upload: trainer" if config.devices.count(device) == 1 else ""
            raise UserError(
                f"{device} ({gpu}) is in compute mode Exclusive_Process, and {users[device]} processes "
                f"of this run need it: nvidia-smi -i {gpu.index} -c DEFAULT, or start NVIDIA's MPS{loader}"
            )


def _has_mps() -> bool:
    """Whether the multi-process service listens where CUDA looks for it."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _is_wsl() -> bool:
    return WINDOWS_GPU.exists() or "microsoft" in KERNEL_VERSION.read_text().lower()


def _setting_text() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def _count(gpus: list[Gpu]) -> str:
    """'2 NVIDIA GPUs (NVIDIA H200, NVIDIA L4) are', each model once."""
    models = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    return f"{len(gpus)} NVIDIA GPU{'s' * (len(gpus) > 1)} ({models}) {'are' if len(gpus) > 1 else 'is'}"


def notices_of_keys(config: Config) -> list[str]:
    """What keys mean on these devices, beyond what they say."""
    if on_gpus(config.devices):
        same = config.parts is None or config.deterministic
        return [] if same else ["parts: GPUs give the same bits in every run with deterministic: true only"]
    return _cost_of_bf16() if config.precision == "bf16" else []


def _cost_of_bf16() -> list[str]:
    """That this processor has no instructions for bfloat16, and what that costs."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    words = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    if not words or _BF16 & set(words):
        return []
    times = "1.3" if "avx512f" in words else "5"
    text = "precision: bf16: this processor has no instructions for bfloat16: a step may take"
    return [f"{text} {times} times as long as in fp32"]


def check_keys(config: Config) -> None:
    """Raises UserError for keys that ask for what these devices can't do and others can."""
    if on_gpus(config.devices):
        if config.loader_restarts and config.upload != "trainer":
            raise UserError(
                "loader_restarts: needs upload: trainer on GPUs: a loader that uploads takes the events with "
                "it that its trainer waits for"
            )
        return
    asked = {"precision": config.precision == "tf32", "cuda_graph": config.cuda_graph is True}
    asked["exchange"] = config.exchange != "auto"
    for key in (key for key, wanted in asked.items() if wanted):
        raise UserError(
            f"{key}: {getattr(config, key)} is for GPUs only, and this run is on {config.devices[0]}"
        )
