"""Which versions of what are here, and what there is to compile kernels with."""

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
from lockstep.doctor.report import Line
from lockstep.errors import UserError
from lockstep.kernels import nvrtc

_INSTALL = "pip install -c constraints.txt -e . (see docs/install.md)"


def describe() -> Iterator[Line]:
    """A line for each thing that Lockstep stands on."""
    yield Line("Python", f"{platform.python_version()}, {sys.executable}")
    yield Line("Lockstep", f"{lockstep.__version__}, {Path(lockstep.__file__).parent}")
    for name in ("torch", "numpy", "h5py"):
        yield _describe_package(name)
    yield Line("PyCUDA", _pycuda())
    yield Line("compiler for kernels", _compiler())


def _describe_package(name: str) -> Line:
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library that it needs can't be loaded
        return Line(name, f"can't be imported: {error}: {_INSTALL}", wrong=True)
    return Line(name, f"{module.__version__}{_cuda_of(module) if name == 'torch' else ''}")


def _cuda_of(torch: ModuleType) -> str:
    return f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"


def _pycuda() -> str:
    """Not imported here: that would look for the driver."""
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
        raise UserError(f"{library._name} does not tell its version: install nvidia-cuda-nvrtc anew")
    return f"{major.value}.{minor.value}"
