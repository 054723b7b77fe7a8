"""Checks of this machine that measure nothing: software, processor and limits, GPUs, and a run's devices."""

import ctypes
import importlib
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import lockstep
from lockstep.backends import devices
from lockstep.backends.devices import count_cores, processor
from lockstep.backends.gpus import NO_DRIVER, Gpu, list_gpus, visible
from lockstep.doctor.report import Finding
from lockstep.errors import UserError
from lockstep.kernels import nvrtc
from lockstep.memory.limits import group_limits, memory_of_machine

_INSTALL = "pip install -c constraints.txt -e . (see docs/install.md)"
_GIB = 1 << 30


def describe_software() -> Iterator[Finding]:
    """Yield a line for each dependency."""
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("Lockstep", f"{lockstep.__version__}, {Path(lockstep.__file__).parent}")
    for name in ("torch", "numpy", "h5py"):
        yield _describe_package(name)
    yield Finding("PyCUDA", _pycuda())
    yield Finding("compiler for kernels", _compiler())


def _describe_package(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library can't be loaded
        return Finding(name, f"can't be imported: {error}: {_INSTALL}", wrong=True)
    return Finding(name, f"{module.__version__}{_cuda_of(module) if name == 'torch' else ''}")


def _cuda_of(torch: ModuleType) -> str:
    return f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"


def _pycuda() -> str:
    """Return PyCUDA's version without importing it, which would load the driver."""
    try:
        return version("pycuda")
    except PackageNotFoundError:
        return "not installed (only GPUs need it)"


def _compiler() -> str:
    library, nvcc = nvrtc.find(), shutil.which("nvcc")
    if library is not None:
        return f"NVRTC {_nvrtc_version(library)}, {library._name}"
    return f"nvcc, {nvcc}" if nvcc else "neither NVRTC nor nvcc (only GPUs need it)"


def _nvrtc_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        raise UserError(f"{library._name} does not report its version: reinstall nvidia-cuda-nvrtc")
    return f"{major.value}.{minor.value}"


def describe_machine(runs: Path) -> Iterator[Finding]:
    """Yield lines about the machine. runs: the folder of runs, which may be missing yet."""
    yield Finding("processor", f"{processor()}, {count_cores()} of {os.cpu_count()} cores for this process")
    memory = memory_of_machine()
    total, available = memory["MemTotal"], memory["MemAvailable"]
    yield Finding("memory", f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f}")
    limits = [group.limit for group in group_limits()]
    text = f"{min(limits) / _GIB:.1f} GiB; a run that takes more is killed" if limits else "none"
    yield Finding("limit by control group", text)
    yield Finding("limit on locked memory", _locked_memory())
    yield _describe_runs(runs)


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists and may be looked at."""
    # Path.is_dir() raises OSError for a path that may not be looked at, or whose name is too long.
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(place))


def _locked_memory() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "none"
    return f"{limit / 2**20:,.1f} MiB (ulimit -l); raise it if page-locked memory for a GPU can't be had"


def _describe_runs(runs: Path) -> Finding:
    place = existing(runs)
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:,.1f} GiB free in {place}, where runs are written"
    if not os.access(place, os.W_OK):
        return Finding("disk space", f"{place} can't be written to: set weights_dir", wrong=True)
    return Finding("disk space", text)


def find_gpus() -> tuple[list[Gpu], list[Finding]]:
    """Return all GPUs, also hidden ones, and lines about them. A driver without GPUs is wrong."""
    try:
        gpus = list_gpus()
    except UserError as error:
        return [], [Finding("GPUs", f"none: {error}", wrong=not str(error).startswith(NO_DRIVER))]
    return gpus, [Finding(f"GPU {gpu.index}", _describe_gpu(gpu)) for gpu in gpus]


def choose_devices(asked: tuple[str, ...], gpus: list[Gpu]) -> tuple[tuple[str, ...], list[Finding]]:
    """Return the devices of a run, and lines with the reasons.

    A line is wrong if a requested device or a visible GPU can't be used.

    Args:
        asked: `devices` of the configuration; empty if Lockstep chooses.
        gpus: All GPUs of the machine.
    """
    if asked:
        try:
            chosen = devices.normalise(asked)
            devices.check(chosen)
        except UserError as error:
            return devices.choose()[0], [Finding("devices", str(error), wrong=True)]
        line = Finding("devices", f"{', '.join(chosen)}, as the configuration says")
    else:
        chosen, reason = devices.choose()
        unused = not devices.on_gpus(chosen) and _offers(gpus)
        line = Finding("devices", f"{', '.join(chosen)}; {reason}", wrong=unused)
    return chosen, [line, *(Finding("note", text) for text in devices.notices(chosen))]


def _offers(gpus: list[Gpu]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES leaves any GPU visible."""
    try:
        return bool(visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
    except UserError:  # it names a MIG instance
        return True


def _describe_gpu(gpu: Gpu) -> str:
    memory = "shared memory" if gpu.memory_mib is None else f"{gpu.memory_mib / 1024:,.1f} GiB"
    mode = "" if gpu.mode == "Default" else f"compute mode {gpu.mode}, "
    return f"{gpu}, {gpu.uuid}, {memory}, MIG {'on' if gpu.mig else 'off'}, {mode}driver {gpu.driver}"
