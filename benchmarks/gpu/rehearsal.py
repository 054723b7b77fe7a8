"""Rehearsals: PyCUDA on the simulated driver of the tests, and a program `nvidia-smi` that lists its devices.

torch computes on the CPU there, so that what is torch.cuda's (graphs, NCCL) is left out.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

HERE = Path(__file__).resolve().parents[2] / "tests" / "cuda_sim"


def environment(folder: Path) -> dict[str, str]:
    """For processes that are to be on the simulated driver, which is built in `folder`.

    Raises UserError where there is no CUDA toolkit to build PyCUDA with.
    """
    sys.path.insert(0, str(HERE))
    import build
    import simulated

    toolkit = build.toolkit()
    if toolkit is None:
        raise UserError("a rehearsal needs the CUDA toolkit (nvcc with its headers) and g++")
    (folder / "devices").mkdir()
    site = build.build_pycuda(toolkit)
    driver = build.build_driver(folder, toolkit, build.names_needed(site))
    parts = (site, driver, build.build_kernels(folder), folder / "devices")
    found: dict[str, str] = simulated.Simulation(*parts, {}).set(proof_bytes=1 << 16).environment()
    return {**found, "OMP_NUM_THREADS": "1"}  # so that it does not take longer where others work too


def flow_on_the_host() -> None:
    """Devices of lockstep.flow whose values are torch's on the CPU."""
    import simulated

    simulated.compute_flow_on_the_host()


def join() -> None:
    """Puts this process onto the simulated driver that its environment names."""
    sys.path.insert(0, str(HERE))
    import simulated

    parts: list[Any] = [Path(part) for part in json.loads(os.environ["CUDA_SIM_PARTS"])]
    simulated.use(simulated.Simulation(*parts, {}))
