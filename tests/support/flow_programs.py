"""Programs that use flow in a process of their own, on the simulated driver where needed."""

import subprocess
import sys
from pathlib import Path

from limits import limit
from simulated import HERE

ROOT = Path(__file__).resolve().parents[2]
# The first lines of a program that runs on the simulated driver; its settings are environment variables.
SIMULATED = f"""
import json, os, sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
import simulated
settings = {{name: value for name, value in os.environ.items() if name.startswith("CUDA_SIM_")}}
parts = [Path(part) for part in json.loads(os.environ["CUDA_SIM_PARTS"])]
simulated.use(simulated.Simulation(*parts, settings))
import torch
simulated.compute_flow_on_the_host()
"""


def run_program(program: str, environment: dict[str, str] | None = None) -> str:
    """Run Python code in a fresh interpreter and return its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(100),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
