"""Makes a process use PyCUDA on the simulated driver: it calls `use` before anything else.

`environment` makes every child of a program do so: sitecustomize.py in site/ calls `use` in them.
"""

import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Simulation:
    """Where the parts are. folder: what stands for the devices; settings: see driver.c."""

    site: Path
    driver: Path
    kernels: Path
    folder: Path
    settings: dict[str, str]

    def set(self, **settings: object) -> "Simulation":
        """The same with settings, written without their CUDA_SIM_."""
        values = {f"CUDA_SIM_{name.upper()}": str(value) for name, value in settings.items()}
        return Simulation(self.site, self.driver, self.kernels, self.folder, {**self.settings, **values})

    def environment(self) -> dict[str, str]:
        """For a program whose trainers and loaders are to use it; `nvidia-smi` lists its devices."""
        parts = [str(part) for part in (self.site, self.driver, self.kernels, self.folder)]
        program = self.folder / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        devices = range(int(self.settings.get("CUDA_SIM_DEVICES", 2)))
        lines = [
            f"{n}, GPU-{n}, 00000000:{n + 1:02X}:00.0, simulated device {n}, 580, 1024, " for n in devices
        ]
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}Disabled, Default'\n" for line in lines))
        program.chmod(0o755)
        return {
            **os.environ,
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(self.site), *sys.path]),
            "CUDA_SIM_PARTS": json.dumps(parts),
            "CUDA_SIM_FOLDER": str(self.folder),
            **self.settings,
        }


def use(simulation: Simulation) -> None:
    """Loads the driver before PyCUDA looks for libcuda.so.1; torch sees device memory as host memory."""
    os.environ["CUDA_SIM_FOLDER"] = str(simulation.folder)
    os.environ.update(simulation.settings)
    ctypes.CDLL(str(simulation.driver), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(simulation.site))
    from lockstep import kernels
    from lockstep.backends import cuda as backend
    from lockstep.memory import cuda as memory

    if "CUDA_SIM_PROOF_BYTES" in os.environ:  # a simulated kernel takes seconds for what training proves
        from lockstep.exchange import proof

        proof.PROOF_BYTES = int(os.environ["CUDA_SIM_PROOF_BYTES"])
    kernels.compiled = lambda name, architecture: simulation.kernels  # type: ignore[assignment]
    memory.as_bytes = host_view
    backend.start_torch = compute_on_the_host


def host_view(block: Any, device: object) -> Any:
    import numpy as np
    import torch

    buffer = (ctypes.c_uint8 * block.n_bytes).from_address(block.pointer)
    buffer.block = block  # type: ignore[attr-defined]  # kept for as long as the tensor
    return torch.from_numpy(np.ctypeslib.as_array(buffer))


def compute_flow_on_the_host() -> None:
    """torch's work is not in the streams of lockstep.flow here: it begins when the lane's has done all."""
    import torch

    from lockstep.flow import gpu

    def launch(self: Any, function: Callable[[], Any]) -> Any:
        self._here.stream.synchronize()
        self._here.held = []
        return function()

    def hold(self: Any, values: Any) -> None:
        """As torch's allocator does: until the stream has done what is launched next."""
        self._here.held = [*self._here.held, *values]

    gpu.torch_device = lambda name: torch.device("cpu")
    gpu.Cuda.launch, gpu.Cuda.hold = launch, hold  # type: ignore[method-assign]


def compute_on_the_host(device: object, stream: Any) -> None:
    """torch's work is not in the stream here: it begins when the stream has done what came before it."""
    from lockstep.network.kernels import DropoutKernel, LrnKernel, PoolKernel, SgdKernel

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wait_first(*arguments: Any, **options: Any) -> Any:
            stream.synchronize()
            return function(*arguments, **options)

        return wait_first

    def between(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wait_twice(*arguments: Any) -> Any:
            stream.synchronize()
            result = function(*arguments)
            stream.synchronize()
            return result

        return wait_twice

    kernels = [(kind, way) for kind in (LrnKernel, PoolKernel) for way in ("forward", "backward")]
    kernels += [(DropoutKernel, "apply"), (SgdKernel, "step")]
    for place, name in kernels:
        setattr(place, name, between(getattr(place, name)))
    for place, name in _places_of_torch():
        setattr(place, name, behind(getattr(place, name)))


def _places_of_torch() -> list[tuple[Any, str]]:
    """Functions by which a trainer or rank has torch compute: what holds them, and their names."""
    import train_funcs
    from lockstep.hosts.network import Network
    from lockstep.hosts.over import OverHosts
    from lockstep.network.arena import Arena
    from lockstep.network.factors import Factors
    from lockstep.network.gradients import Gradients
    from lockstep.network.replica import Replica
    from lockstep.network.sharded import ShardedUpdater
    from lockstep.network.shared_rows import SharedRows
    from lockstep.network.updater import Updater
    from lockstep.sync import apart, assembling
    from lockstep.sync.apart import Apart
    from lockstep.sync.elastic import Elastic
    from lockstep.sync.gossip import Gossip
    from lockstep.sync.outer import Outer

    return [
        (Replica, "forward_backward"),
        (Updater, "step"),
        (Network, "sum"),
        (Network, "gather"),
        (OverHosts, "_share"),
        (Gradients, "complete"),
        (Factors, "collect"),
        (ShardedUpdater, "average"),
        (ShardedUpdater, "step"),
        (ShardedUpdater, "norms"),
        (ShardedUpdater, "use_norms"),
        (ShardedUpdater, "finish"),
        (SharedRows, "exchange"),
        (SharedRows, "rows"),
        (Outer, "_step"),
        (Apart, "mean"),
        (Elastic, "_move"),
        (Gossip, "_blend"),
        (assembling, "in_host_memory"),
        (apart, "in_host_memory"),  # which has the function by its name
        (Replica, "count_errors"),
        (Replica, "log_probabilities"),
        (Arena, "digests"),
        (Arena, "state"),
        (train_funcs.Trainer, "save"),
        *([(sys.modules["lockstep.synk.gpu"].Gpu, "compute")] if "lockstep.synk.gpu" in sys.modules else []),
    ]
