"""The CUDA kernels, compiled once per architecture by NVRTC or nvcc and kept in the user's cache folder.

NVRTC goes first: torch's CUDA wheels bring it, so it fits the CUDA that torch runs on, and it needs no gcc.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.kernels import nvrtc

HERE = Path(__file__).resolve().parent
# As tests/cuda_sim/build.py for the host: what is added and what is multiplied is rounded as it is written.
OPTIONS = ["--fmad=false"]


def load(driver: Any, name: str) -> Any:
    """The PyCUDA module of kernels/<name>.cu, for the device whose context is current.

    Raises UserError where it can't be compiled, or the driver refuses it.
    """
    major, minor = driver.Context.get_device().compute_capability()
    cubin = compiled(name, f"sm_{major}{minor}")
    try:
        return driver.module_from_file(str(cubin))
    except driver.Error as error:
        raise UserError(
            f"{cubin}: the driver can't load it ({error}): it may be older than the compiler"
        ) from error


def compiled(name: str, architecture: str) -> Path:
    """The cubin of kernels/<name>.cu, compiled now where these sources never were for it.

    Raises UserError where there is neither NVRTC nor nvcc, or it can't compile, or the cubin can't be kept.
    """
    source = HERE / f"{name}.cu"
    files = [source, *sorted(HERE.glob("*.cuh"))]
    content = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256(" ".join(OPTIONS).encode() + content).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep"
    cubin = cache / f"{name}-{architecture}-{digest}.cubin"
    if not cubin.exists():
        _keep(_compile(source, architecture), cubin)
    return cubin


def _compile(source: Path, architecture: str) -> bytes:
    options = [f"--gpu-architecture={architecture}", f"--include-path={source.parent}", *OPTIONS]
    library, nvcc = nvrtc.find(), shutil.which("nvcc")
    if library is not None:
        return nvrtc.compile_cubin(library, source, options)
    if nvcc is not None:
        return _compile_with_nvcc(nvcc, source, options)
    raise UserError(
        f"neither NVRTC (libnvrtc) nor nvcc is here: one is needed once, to compile {source.name}; "
        "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit"
    )


def _compile_with_nvcc(nvcc: str, source: Path, options: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        command = [nvcc, *options, "-cubin", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{nvcc} can't compile {source.name} with {options[0]}: {done.stderr.strip()}")
        return cubin.read_bytes()


def _keep(content: bytes, cubin: Path) -> None:
    try:
        cubin.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cubin.parent) as folder:
            made = Path(folder) / cubin.name
            made.write_bytes(content)
            made.replace(cubin)  # in one step: several ranks may compile at once
    except OSError as error:
        reason = f"{cubin.parent}: can't be written to: {error.strerror}"
        raise UserError(f"{reason}; set XDG_CACHE_HOME to a folder that can") from error
