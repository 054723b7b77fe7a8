"""The CUDA kernels, their Python wrappers, and their compilation into the user's cache folder.

Each kernel is a .cu file beside a Python wrapper of the same name (fold.cu and fold.py). It is compiled once
per architecture. NVRTC does it if it is found: torch's CUDA wheels bring it, so it matches torch's CUDA,
and it needs no gcc. Otherwise nvcc does.
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
# No fused multiply-add: each sum and product is rounded as written. tests/cuda_sim/build.py does the same.
OPTIONS = ["--fmad=false"]


def load(driver: Any, name: str) -> Any:
    """Return the PyCUDA module of kernels/<name>.cu for the device of the current context.

    Raises:
        UserError: The kernel cannot be compiled, or the driver refuses it.
    """
    major, minor = driver.Context.get_device().compute_capability()
    cubin = compiled(name, f"sm_{major}{minor}")
    try:
        return driver.module_from_file(str(cubin))
    except driver.Error as error:
        raise UserError(
            f"{cubin}: the driver can't load it ({error}). Update a driver that is older than the compiler."
        ) from error


def compiled(name: str, architecture: str) -> Path:
    """Return the cubin of kernels/<name>.cu; compile it if the cache does not have it.

    Raises:
        UserError: There is neither NVRTC nor nvcc, compiling fails, or the cache cannot be written.
    """
    source = HERE / f"{name}.cu"
    files = [source, *sorted(HERE.glob("*.cuh"))]
    content = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256(" ".join(OPTIONS).encode() + content).hexdigest()[:16]
    cubin = _cache_folder() / f"{name}-{architecture}-{digest}.cubin"
    if not cubin.exists():
        _store(_compile(source, architecture), cubin)
    return cubin


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep"


def _compile(source: Path, architecture: str) -> bytes:
    options = [f"--gpu-architecture={architecture}", f"--include-path={source.parent}", *OPTIONS]
    library, nvcc = nvrtc.find(), shutil.which("nvcc")
    if library is not None:
        return nvrtc.compile_cubin(library, source, options)
    if nvcc is not None:
        return _compile_with_nvcc(nvcc, source, options)
    raise UserError(
        f"neither NVRTC (libnvrtc) nor nvcc is here: one is needed once, to compile {source.name}. "
        "Run pip install nvidia-cuda-nvrtc, or install the CUDA toolkit."
    )


def _compile_with_nvcc(nvcc: str, source: Path, options: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        command = [nvcc, *options, "-cubin", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{nvcc} can't compile {source.name} with {options[0]}: {done.stderr.strip()}")
        return cubin.read_bytes()


def _store(content: bytes, cubin: Path) -> None:
    try:
        cubin.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cubin.parent) as folder:
            temporary = Path(folder) / cubin.name
            temporary.write_bytes(content)
            temporary.replace(cubin)  # atomically, because several ranks may compile at once
    except OSError as error:
        reason = f"{cubin.parent}: can't be written to: {error.strerror}"
        raise UserError(f"{reason}. Set XDG_CACHE_HOME to a folder that can.") from error
