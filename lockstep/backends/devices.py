"""The devices of this machine, and which of them a run uses.

It runs in the launcher, which never touches CUDA and never imports torch or PyCUDA. So it looks at what is
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
from lockstep.config.augmentation import uploader_of
from lockstep.config.rules import on_failure_of
from lockstep.errors import UserError

# Linux inside Windows (WSL 2) shows in its kernel's name, and in the device file of its GPU.
KERNEL_VERSION = Path("/proc/version")
WINDOWS_GPU = Path("/dev/dxg")
_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names of bfloat16 instructions, on x86 and on ARM
_MOST_READERS = 4
_LOADER_RESTARTS = 3  # of each loader, with `auto`; its next loss starts all processes anew
_GPU = re.compile(r"(?:gpu|cuda:)(\d+)")
_ON_CPU = "to train on the CPU: --spec spec_cpu.yaml"
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True")


def normalise(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return every device as 'cpu' or 'cuda:<n>'.

    Raises:
        UserError: A name is not a device.
    """
    return tuple(_normalise_one(device) for device in devices)


def _normalise_one(device: str) -> str:
    if device == "cpu":
        return device
    match = _GPU.fullmatch(device)
    if not match:
        raise UserError(f"devices: {device!r} is not a device. Write cpu, cuda:0 or gpu0.")
    return f"cuda:{int(match.group(1))}"


def on_gpus(devices: Iterable[object]) -> bool:
    """Return whether any device, torch's or a name from `normalise`, is a GPU."""
    return any(str(device).partition(":")[0] != "cpu" for device in devices)


def are_mixed(devices: Iterable[str]) -> bool:
    """Return whether there are CPUs and GPUs among the devices, as `normalise` returns them."""
    names = set(devices)
    return "cpu" in names and len(names) > 1


def gpus_among(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the GPUs among the devices, as `normalise` returns them."""
    return tuple(device for device in devices if device != "cpu")


def _numbers(devices: Iterable[str]) -> list[int]:
    """Return n of each 'cuda:<n>' among the devices."""
    return [int(device.removeprefix("cuda:")) for device in gpus_among(devices)]


def unused(devices: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return so many devices to add to a run: CPUs, which can have any number of trainers, or other GPUs."""
    if "cpu" in devices:
        return ("cpu",) * number
    taken = _numbers(devices)
    free = [place for place in range(len(devices) + number) if place not in taken]
    return tuple(f"cuda:{place}" for place in free[:number])


def choose(otherwise: str = "training on the CPU") -> tuple[tuple[str, ...], str]:
    """Return the devices of a run that names none, and why: all visible GPUs if usable, else CPUs.

    Args:
        otherwise: What happens without GPUs, for the reason.
    """
    cpus = ("cpu",) * min(2, count_cores())
    try:
        gpus, shown = _look()
    except UserError as error:
        return cpus, f"{error}; {otherwise}"
    obstacle = _find_obstacle(shown) if shown else f"{_setting_text()} hides them"
    if obstacle:
        return cpus, f"{_count(gpus)} here, but {obstacle}; {otherwise}"
    names = tuple(f"cuda:{number}" for number in range(len(shown)))
    listing = ", ".join(f"{name} ({gpu})" for name, gpu in zip(names, shown, strict=True))
    return names, f"all visible GPUs, with driver {shown[0].driver}: {listing}"


def check(devices: tuple[str, ...], otherwise: str = _ON_CPU) -> None:
    """Check that the devices, as `normalise` returns them, exist and can be used.

    Args:
        otherwise: What to do without them, for the error.

    Raises:
        UserError: A device is missing or cannot be used.
    """
    numbers = _numbers(devices)
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
    """Return warnings about these devices and their environment that need no change."""
    if not on_gpus(devices):
        return []
    warnings = _differences(devices)
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if _EXPANDABLE.search(os.environ.get(key, "")):
            warnings.append(
                f"{key} sets expandable_segments:True, which can't be shared between processes; harmless "
                "here, because PyCUDA allocates what is shared"
            )
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if order != "PCI_BUS_ID":
        warnings.append(f"CUDA_DEVICE_ORDER is {order}: if GPUs differ, cuda:0 may not be nvidia-smi's GPU 0")
    return warnings


def _differences(devices: tuple[str, ...]) -> list[str]:
    """Return a warning if the devices round differently: CPUs beside GPUs, or several models of GPUs."""
    models = _models(devices)
    if len(models) < 2:
        return []
    return [
        f"devices: {', '.join(models)} round differently: this is the same training up to rounding, but its "
        "bits may differ from those on other devices, and with other shares"
    ]


def _models(devices: tuple[str, ...]) -> list[str]:
    """Return the different models among the devices, each of which rounds in its own way."""
    return sorted(set(describe(devices).values()))


def describe(devices: tuple[str, ...]) -> dict[str, str]:
    """Return the model of each device by its name, and the driver of GPUs, for the run's record."""
    host = {"cpu": processor()} if "cpu" in devices else {}
    numbers = _numbers(devices)
    shown = _look()[1] if numbers else []
    gpus = {f"cuda:{number}": f"{shown[number].name}, driver {shown[number].driver}" for number in numbers}
    return host | gpus


def number_gpus_by_place() -> None:
    """Make processes that start from now on number GPUs by their place on the PCI bus, as nvidia-smi does.

    CUDA's default puts the fastest GPU first: cuda:0 would be one GPU to this file and another to a trainer.
    A setting of the user is not changed.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def count_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def count_readers(devices: tuple[str, ...]) -> int:
    """Return the default number of a loader's reading threads.

    One thread reads 40,000 to 60,000 images a second, which only a GPU can train on. Each device's trainer
    has a core to itself.
    """
    if not on_gpus(devices):
        return 1
    return max(1, min(_MOST_READERS, count_cores() // len(devices) - 1))


def processor() -> str:
    """Return the name of the processor's model."""
    for line in _CPUINFO.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # Linux on ARM has no model name


def _look() -> tuple[list[Gpu], list[Gpu]]:
    """Return all GPUs, and those that CUDA shows, in its order."""
    gpus = list_gpus()
    return gpus, visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _find_obstacle(shown: list[Gpu]) -> str:
    """Return why the visible GPUs cannot be used, and the remedy; '' if they can.

    All visible GPUs count, used or not: a process that sees a MIG instance sees no other GPU (NVIDIA's MIG
    user guide, "CUDA Device Enumeration").
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
        # Force the installation, because pip accepts 2.13.0+cpu as the requested 2.13.0.
        install = "pip install --force-reinstall -c constraints.txt torch"
        return f"torch {torch_version} is a build without CUDA: {install} (see docs/install.md)"
    return ""


def check_sharing(config: Config) -> None:
    """Check that no GPU admits fewer processes than this run needs.

    A loader beside its trainer is a second process on the GPU, unless the trainer uploads; so is a second
    trainer on the same GPU. With NVIDIA's multi-process service (MPS) all are clients of one process.

    Raises:
        UserError: A GPU admits one process only, and the run needs several there.
    """
    users = Counter(config.devices * (1 if uploader_of(config) == "trainer" else 2))
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
    """Return whether the multi-process service listens where CUDA looks for it."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _is_wsl() -> bool:
    return WINDOWS_GPU.exists() or "microsoft" in KERNEL_VERSION.read_text().lower()


def _setting_text() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def _count(gpus: list[Gpu]) -> str:
    """Return a text like '2 NVIDIA GPUs (NVIDIA H200, NVIDIA L4) are', with each model once."""
    models = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    return f"{len(gpus)} NVIDIA GPU{'s' * (len(gpus) > 1)} ({models}) {'are' if len(gpus) > 1 else 'is'}"


def notices_of_keys(config: Config) -> list[str]:
    """Return warnings about keys whose effect depends on these devices."""
    if on_gpus(config.devices):
        same = config.logical_ranks is None or config.deterministic
        if same:
            return []
        return ["logical_ranks: GPUs give the same bits in every run with deterministic: true only"]
    return _cost_of_bf16() if config.precision == "bf16" else []


def _check_mixed(config: Config) -> None:
    """Check that CPUs and GPUs in one run can do what the keys ask for."""
    names = ", ".join(config.devices)
    if config.exchange not in ("auto", "staged"):
        raise UserError(
            f"exchange: {config.exchange} is between GPUs only, and devices are {names}: set auto or staged"
        )
    if config.recheck_every:
        raise UserError(
            f"recheck_every: CPUs and GPUs round differently, so {names} can't be compared: set it to null"
        )
    if config.n_hosts > 1:
        raise UserError(
            f"devices: {names}: over several hosts a run is on CPUs or on GPUs, not on both: name one kind"
        )


def _cost_of_bf16() -> list[str]:
    """Return a warning if this processor has no instructions for bfloat16."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    if not flags or _BF16 & set(flags):
        return []
    times = "1.3" if "avx512f" in flags else "5"
    text = "precision: bf16: this processor has no instructions for bfloat16: a step may take"
    return [f"{text} {times} times as long as in fp32"]


def loader_restarts_of(config: Config) -> int:
    """Return how often a killed loader is started again while its trainer waits.

    `auto` is 0 for runs that do not restart, and for loaders that upload to GPUs: see `check_keys`.
    """
    if config.loader_restarts != "auto":
        return config.loader_restarts
    is_possible = config.para_load and (uploader_of(config) == "trainer" or not on_gpus(config.devices))
    return _LOADER_RESTARTS if is_possible and on_failure_of(config) == "restart" else 0


def check_keys(config: Config) -> None:
    """Check that these devices can do what the keys ask for.

    Raises:
        UserError: A key needs another kind of device.
    """
    if are_mixed(config.devices):
        _check_mixed(config)
    if on_gpus(config.devices):
        if config.recheck_every and not config.deterministic:
            raise UserError(
                "recheck_every: GPUs compute the same bits again with deterministic: true only. Set it."
            )
        if config.recheck_every and len(models := _models(config.devices)) > 1:
            raise UserError(
                f"recheck_every: {', '.join(models)} round differently, so they can't be compared: set it to "
                "null, or use GPUs of one model"
            )
        if loader_restarts_of(config) and uploader_of(config) != "trainer":
            raise UserError(
                "loader_restarts: needs upload: trainer on GPUs: a loader that uploads takes events with "
                "it when it exits, and its trainer waits for them. Set upload: trainer."
            )
        return
    asked = {"precision": config.precision == "tf32", "cuda_graph": config.cuda_graph is True}
    asked["exchange"] = config.exchange != "auto"
    for key in (key for key, is_set in asked.items() if is_set):
        raise UserError(
            f"{key}: {getattr(config, key)} is for GPUs only, and this run is on {config.devices[0]}"
        )
