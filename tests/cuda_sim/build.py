"""Builds lockstep/kernels/*.cu for the host, behind shim.h, into one shared library."""

import ctypes
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "lockstep" / "kernels"
# No contraction into fused multiply-adds: what is added and what is multiplied is rounded as it is written.
FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]


def build(folder: Path) -> ctypes.CDLL:
    """The library; its `launch_kernel(name, packed, blocks, threads)` gives 0, or 1 for an unknown name."""
    sources = sorted(KERNELS.glob("*.cu"))
    names = [name for source in sources for name in re.findall(r"__global__ void (\w+)", source.read_text())]
    lines = ['#include "shim.h"', *(f'#include "{source}"' for source in sources)]
    lines.append('extern "C" int launch_kernel(')
    lines.append("    const char *name, const char *packed, unsigned blocks, unsigned threads) {")
    for name in names:
        lines.append(f'    if (!strcmp(name, "{name}")) return launch({name}, packed, blocks, threads), 0;')
    (folder / "kernels.cpp").write_text("\n".join([*lines, "    return 1;", "}", ""]))
    library = folder / "libkernels.so"
    command = ["g++", *FLAGS, "-I", str(HERE), "-o", str(library), str(folder / "kernels.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))
