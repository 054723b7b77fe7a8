"""The versions of packages, and the compiler of kernels."""

import ctypes
import importlib
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import lockstep
from lockstep.doctor.report import Finding
from lockstep.errors import UserError
from lockstep.kernels import nvrtc

_INSTALL = "pip install -c constraints.txt -e . (see docs/install.md)"


def describe() -> Iterator[Finding]:
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
