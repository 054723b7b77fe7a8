"""Puts trainers and loaders, which a launcher spawns, onto the simulated driver (../simulated.py).

With CUDA_SIM_ALL every program, since the ranks of lockstep.synk are the user's process and what it starts.

Python imports this file by itself where its folder is on PYTHONPATH.
"""

import json
import os
import sys
from pathlib import Path

chosen = "--multiprocessing-fork" in sys.orig_argv or "CUDA_SIM_ALL" in os.environ
if chosen and "CUDA_SIM_PARTS" in os.environ:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import simulated

    settings = {name: value for name, value in os.environ.items() if name.startswith("CUDA_SIM_")}
    parts = [Path(part) for part in json.loads(os.environ["CUDA_SIM_PARTS"])]
    simulated.use(simulated.Simulation(*parts, settings))
