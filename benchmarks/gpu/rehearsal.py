"""Rehearsals: PyCUDA on the simulated driver of the tests, and a program `nvidia-smi` that lists its devices.

torch computes on the CPU, so that a rehearsal leaves out all parts of torch.cuda, such as graphs and NCCL.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

HERE = Path(__file__).resolve().parents[2] / "tests" / "cuda_sim"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of processes on the simulated driver, whose devices are files in `folder`.

    Raises:
        UserError: There is no CUDA toolkit to build PyCUDA with.
    """
    sys.path.insert(0, str(HERE))
    import build
    import simulated

    toolkit = build.toolkit()
    if toolkit is None:
        raise UserError("a rehearsal needs the CUDA toolkit (nvcc with its headers) and g++")
    (folder / "devices").mkdir()
    site = build.build_pycuda(toolkit)
    driver = build.build_driver(toolkit, build.names_needed(site))
    parts = (site, driver, build.build_kernels(), folder / "devices")
    found: dict[str, str] = simulated.Simulation(*parts, {}).set(proof_bytes=1 << 16).environment()
    return {**found, "OMP_NUM_THREADS": "1"}  # more threads would be slower on a busy machine


def flow_on_the_host() -> None:
    """Let torch compute the values of lockstep.flow's devices on the CPU."""
    import simulated

    simulated.compute_flow_on_the_host()


def join() -> None:
    """Use the simulated driver that the environment names in this process."""
    sys.path.insert(0, str(HERE))
    import simulated

    parts: list[Any] = [Path(part) for part in json.loads(os.environ["CUDA_SIM_PARTS"])]
    simulated.use(simulated.Simulation(*parts, {}))
