"""Builds for running PyCUDA without a GPU: the simulated driver, the kernels for the host, PyCUDA itself.

Each is built once and cached in the user's cache folder under a digest of its sources, compiler and flags, so
that later runs and all workers of a run share it. PyCUDA is compiled from source: two minutes of one core.
"""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "lockstep" / "kernels"
PYCUDA = "2026.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep"
# Without fused multiply-adds every addition and multiplication is rounded as the source says.
KERNEL_FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
KERNEL_FLAGS += ["-Wno-unknown-pragmas"]  # nvcc's `unroll`
DRIVER_FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
PYCUDA_FLAGS = ["-O0", "-g0"]  # compiles in a third of the time; the tests do not need its speed


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def toolkit() -> Path | None:
    """Return the folder of the CUDA toolkit that nvcc belongs to, or None without nvcc or g++."""
    if shutil.which("nvcc") is None or shutil.which("g++") is None:
        return None
    match = re.search(r"TOP=(.+)", run("nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null"))
    return Path(match[1]).resolve() if match else None


@functools.cache
def compiler_version() -> str:
    return run("g++", "--version").splitlines()[0]


def cached(name: str, make: Callable[[Path], object], *keys: object) -> Path:
    """Return the folder `<name>-<digest of keys>` of the cache, filled by `make(folder)` where it is new.

    If several processes need it at once, one builds it and the others wait. The folder is never partial.
    """
    digest = hashlib.sha256(repr([compiler_version(), *keys]).encode()).hexdigest()[:16]
    folder = CACHE / f"{name}-{digest}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            work = CACHE / f".building-{folder.name}"
            shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
            (work / "made").mkdir(parents=True)
            make(work / "made")
            (work / "made").rename(folder)
            shutil.rmtree(work)
    return folder


def build_kernels() -> Path:
    """Return the kernels as a host library.

    Its `launch_kernel(name, arguments, blocks, rows of blocks, threads)` returns 0, or 1 for an unknown name.
    """
    files = [HERE / "shim.h", *sorted(KERNELS.glob("*.cu*"))]
    texts = [(str(file), file.read_text()) for file in files]
    return cached("kernels", _build_kernels, KERNEL_FLAGS, texts) / "libkernels.so"


def _build_kernels(folder: Path) -> None:
    sources = sorted(KERNELS.glob("*.cu"))
    lines, names = ['#include "shim.h"'], []
    for source in sources:  # a namespace per file: they may define the same names
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
    run("g++", *KERNEL_FLAGS, "-I", HERE, "-o", folder / "libkernels.so", folder / "kernels.cpp")


def build_driver(cuda: Path, needed: set[str]) -> Path:
    """Return the simulated libcuda.so.1; every function of `needed` that it lacks says 'not supported'."""
    make = functools.partial(_build_driver, cuda=cuda, needed=needed)
    source = (HERE / "driver.c").read_text()
    return cached("driver", make, DRIVER_FLAGS, str(cuda), source, sorted(needed)) / "libcuda.so.1"


def _build_driver(folder: Path, cuda: Path, needed: set[str]) -> None:
    library = folder / "libcuda.so.1"
    source = HERE / "driver.c"
    run("gcc", *DRIVER_FLAGS, "-I", cuda / "include", "-o", library, source, "-lpthread")
    missing = sorted(needed - set(re.findall(r" T (cu\w+)", run("nm", "-D", library))))
    stubs = folder / "missing.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 801; }}\n" for name in missing))
    run("gcc", *DRIVER_FLAGS, "-I", cuda / "include", "-o", library, source, stubs, "-lpthread")


def build_pycuda(cuda: Path) -> Path:
    """Return a folder with PyCUDA and what it needs, to put into sys.path."""
    keys = PYCUDA, sys.version_info[:2], str(cuda), PYCUDA_FLAGS
    return cached("pycuda", functools.partial(_build_pycuda, cuda), *keys)


def _build_pycuda(cuda: Path, folder: Path) -> None:
    work = folder.parent
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "download", "--no-deps", "--no-build-isolation", "-d", work, f"pycuda=={PYCUDA}")
    shutil.unpack_archive(next(work.glob("pycuda-*.tar.gz")), work)
    source, library = work / f"pycuda-{PYCUDA}", work / "lib"
    with open(source / "aksetup_helper.py", "a") as helper:
        helper.write((HERE / "parallel_compile.py").read_text())
    library.mkdir()
    shutil.copy(build_driver(cuda, set()), library / "libcuda.so")  # to link with
    options = [f"--cuda-root={cuda}", "--no-cuda-enable-curand", f"--cudadrv-lib-dir={library}"]
    options += [f"--cudart-lib-dir={cuda / 'lib64'}", f"--cxxflags={','.join(PYCUDA_FLAGS)}"]
    run(sys.executable, "configure.py", *options, cwd=source)
    run(*pip, "install", "--no-build-isolation", "--no-compile", "--target", folder, source)


def names_needed(site: Path) -> set[str]:
    """Return the names of the driver functions that PyCUDA's extension module links to."""
    module = next((site / "pycuda").glob("_driver*.so"))
    return set(re.findall(r" U (cu\w+)", run("nm", "-D", module)))
