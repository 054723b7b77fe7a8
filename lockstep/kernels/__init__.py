"""The CUDA kernels, compiled once per architecture by nvcc and kept in the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

HERE = Path(__file__).resolve().parent


def load(driver: Any, name: str) -> Any:
    """The PyCUDA module of kernels/<name>.cu, for the device whose context is current."""
    major, minor = driver.Context.get_device().compute_capability()
    return driver.module_from_file(str(compiled(name, f"sm_{major}{minor}")))


def compiled(name: str, architecture: str) -> Path:
    """The cubin of kernels/<name>.cu, compiled now where this source never was for this architecture.

    Raises UserError where there is no nvcc, or it can't compile.
    """
    source = HERE / f"{name}.cu"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep"
    cubin = cache / f"{name}-{architecture}-{digest}.cubin"
    if cubin.exists():
        return cubin
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise UserError(f"nvcc is not on the PATH: it is needed once, to compile {source.name}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / cubin.name
        command = [nvcc, f"-arch={architecture}", "-cubin", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"nvcc can't compile {source.name} for {architecture}: {done.stderr.strip()}")
        made.replace(cubin)  # in one step: several ranks may compile at once
    return cubin
