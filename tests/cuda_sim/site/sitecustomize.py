"""Start the simulated driver (../simulated.py) in trainers and loaders that a launcher starts.

With CUDA_SIM_ALL it starts in every program, because rank 0 of lockstep.synk is the user's process.

Python imports this file at startup where its folder is on PYTHONPATH.
"""

import json
import os
import sys
from pathlib import Path

# The children of these are forks.
servers = "lockstep.launch.template", "multiprocessing.forkserver"
is_server = any(server in word for server in servers for word in sys.orig_argv)
chosen = is_server or "--multiprocessing-fork" in sys.orig_argv or "CUDA_SIM_ALL" in os.environ
if chosen and "CUDA_SIM_PARTS" in os.environ:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import simulated

    settings = {name: value for name, value in os.environ.items() if name.startswith("CUDA_SIM_")}
    parts = [Path(part) for part in json.loads(os.environ["CUDA_SIM_PARTS"])]
    simulated.use(simulated.Simulation(*parts, settings))
