"""Builds what tests need to run PyCUDA without a GPU: the simulated driver, the kernels for the host, PyCUDA
itself.

PyCUDA comes as source only. It is built once (a minute and a half) and kept in a cache folder, by versions.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "lockstep" / "kernels"
PYCUDA = "2026.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep"
# No contraction into fused multiply-adds: what is added and what is multiplied is rounded as it is written.
KERNEL_FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
DRIVER_FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def toolkit() -> Path | None:
    """The folder of the CUDA toolkit that nvcc belongs to, or None where there is no nvcc or no g++."""
    if shutil.which("nvcc") is None or shutil.which("g++") is None:
        return None
    match = re.search(r"TOP=(.+)", run("nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null"))
    return Path(match[1]).resolve() if match else None


def build_kernels(folder: Path) -> Path:
    """The kernels as a host library.

    Its `launch_kernel(name, arguments, blocks, rows of blocks, threads)` gives 0, or 1 for an unknown name.
    """
    sources = sorted(KERNELS.glob("*.cu"))
    lines, names = ['#include "shim.h"'], []
    for source in sources:  # each by itself: they may use the same words
        lines += [f"namespace {source.stem}_cu {{", f'#include "{source}"', "}"]
        found = re.findall(r"__global__ void (\w+)", source.read_text())
        names += [(name, f"{source.stem}_cu::{name}") for name in found]
    lines.append('extern "C" int launch_kernel(')
    lines.append(
        "    const char *name, const char *packed, unsigned blocks, unsigned rows, unsigned threads) {"
    )
    for name, function in names:
        call = f"launch({function}, packed, blocks, rows, threads), 0"
        lines.append(f'    if (!strcmp(name, "{name}")) return {call};')
    (folder / "kernels.cpp").write_text("\n".join([*lines, "    return 1;", "}", ""]))
    library = folder / "libkernels.so"
    run("g++", *KERNEL_FLAGS, "-I", HERE, "-o", library, folder / "kernels.cpp")
    return library


def build_driver(folder: Path, cuda: Path, needed: set[str]) -> Path:
    """The simulated libcuda.so.1; every function of `needed` that it has not says 'not supported'."""
    library = folder / "libcuda.so.1"
    source = HERE / "driver.c"
    run("gcc", *DRIVER_FLAGS, "-I", cuda / "include", "-o", library, source, "-lpthread")
    missing = sorted(needed - set(re.findall(r" T (cu\w+)", run("nm", "-D", library))))
    stubs = folder / "missing.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 801; }}\n" for name in missing))
    run("gcc", *DRIVER_FLAGS, "-I", cuda / "include", "-o", library, source, stubs, "-lpthread")
    return library


def build_pycuda(cuda: Path) -> Path:
    """A folder with PyCUDA and what it needs, to put into sys.path."""
    site = CACHE / f"pycuda-{PYCUDA}-cp{sys.version_info.major}{sys.version_info.minor}-{cuda.name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one builds, the others wait for it
        if not (site / "pycuda").is_dir():
            _build_pycuda(cuda, site)
    return site


def _build_pycuda(cuda: Path, site: Path) -> None:
    work = CACHE / f".building-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "download", "--no-deps", "-d", work, f"pycuda=={PYCUDA}")
    shutil.unpack_archive(next(work.glob("pycuda-*.tar.gz")), work)
    source = work / f"pycuda-{PYCUDA}"
    (work / "lib").mkdir()
    shutil.copy(build_driver(work, cuda, set()), work / "lib" / "libcuda.so")  # to link with
    options = [f"--cuda-root={cuda}", "--no-cuda-enable-curand", f"--cudadrv-lib-dir={work / 'lib'}"]
    run(sys.executable, "configure.py", *options, f"--cudart-lib-dir={cuda / 'lib64'}", cwd=source)
    run(*pip, "install", "--target", work / "site", source)
    (work / "site").rename(site)
    shutil.rmtree(work)


def names_needed(site: Path) -> set[str]:
    """The driver's functions that PyCUDA's extension module is linked to."""
    module = next((site / "pycuda").glob("_driver*.so"))
    return set(re.findall(r" U (cu\w+)", run("nm", "-D", module)))
