"""PyCUDA on the simulated driver: a process calls `use` before anything else.

With `environment`, every child of a program calls it, by sitecustomize.py in site/.

These parts are replaced or missing here, so that only a GPU can test them:
- torch computes on the host, so `start_torch`, `stop_torch`, ExternalStream, and captured steps (StepGraph
  beyond its fallback) do not run, nor does autograd's thread of a device.
- torch's operations wait for the stream and are done when they return: the host never runs ahead of torch's
  kernels, and a missing wait for one of them shows nothing.
- Arrays of lockstep.flow are the host's to torch: record_stream runs against a stand-in only.
- Kernels are compiled by g++, not to cubins. The device's fast functions are off by as much as NVIDIA's guide
  allows (shim.h), not by a device's actual error.
- All tensors are the host's to torch: tensors on different devices, such as a gradient that is not on its
  parameter's device, raise no error.
- No work of torch runs in the default stream, which waits for streams that are not non-blocking.
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
    """The paths of the builds, the folder that represents the devices, and settings (see driver.c)."""

    site: Path
    driver: Path
    kernels: Path
    folder: Path
    settings: dict[str, str]

    def set(self, **settings: object) -> "Simulation":
        """Return a copy with other settings; their names lack the prefix CUDA_SIM_."""
        values = {f"CUDA_SIM_{name.upper()}": str(value) for name, value in settings.items()}
        return Simulation(self.site, self.driver, self.kernels, self.folder, {**self.settings, **values})

    def environment(self) -> dict[str, str]:
        """Return the environment of a program whose children use it; `nvidia-smi` lists its devices."""
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
    """Load the driver before PyCUDA looks for libcuda.so.1; torch sees device memory as host memory."""
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
    # Only the compiler and the cache's folder are replaced; naming, caching and finding are the real code.
    kernels._cache_folder = lambda: simulation.folder / "cache"  # type: ignore[assignment]
    kernels._compile = lambda source, architecture: simulation.kernels.read_bytes()  # type: ignore[assignment]
    memory.as_bytes = host_view
    backend.start_torch = compute_on_the_host
    backend.stop_torch = lambda device: None


def host_view(block: Any, device: object) -> Any:
    """Return a tensor of a block by its CUDA array interface."""
    import numpy as np
    import torch

    from lockstep.memory.cuda import _Bytes

    holder = _Bytes(block)
    received: dict[str, Any] = dict(holder.__cuda_array_interface__)
    assert (received.pop("typestr"), received.pop("version")) == ("|u1", 3)
    (n_bytes,), (pointer, _) = received.pop("shape"), received.pop("data")
    assert not received and n_bytes == block.n_bytes
    buffer = (ctypes.c_uint8 * n_bytes).from_address(pointer)
    buffer.holder = holder  # type: ignore[attr-defined]  # kept for as long as the tensor
    return torch.from_numpy(np.ctypeslib.as_array(buffer))


def compute_flow_on_the_host() -> None:
    """Let torch's operations wait for the lane's stream, because torch computes on the host here."""
    import torch

    from lockstep.flow import gpu

    def launch(self: Any, function: Callable[[], Any]) -> Any:
        self._context.stream.synchronize()
        self._context.held = []
        return function()

    def hold(self: Any, values: Any) -> None:
        """Keep memory until the stream has completed the next launch, like torch's allocator."""
        self._context.held = [*self._context.held, *values]

    gpu.torch_device = lambda name: torch.device("cpu")
    gpu.Cuda.launch, gpu.Cuda.hold = launch, hold  # type: ignore[method-assign]


def compute_on_the_host(device: object, stream: Any) -> None:
    """Let torch's operations wait for the stream, because torch computes on the host here."""
    from lockstep.kernels.dropout import DropoutKernel
    from lockstep.kernels.lrn import LrnKernel
    from lockstep.kernels.pool import PoolKernel
    from lockstep.kernels.sgd import SgdKernel
    from lockstep.sync.unsynchronized import UnsynchronizedRule

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

    # A CPU's convolution adds the bias before it rounds: programs would not have the bits of CPUs.
    PoolKernel.adds_biases = "CUDA_SIM_BIASES" in os.environ
    kernels = [(kind, way) for kind in (LrnKernel, PoolKernel) for way in ("forward", "backward")]
    kernels += [(PoolKernel, "bias_gradient"), (DropoutKernel, "apply"), (SgdKernel, "step")]
    kernels += [(UnsynchronizedRule, "answer")]  # its caller copies what the exchange has written
    for place, name in kernels:
        setattr(place, name, between(getattr(place, name)))
    for place, name in _places_of_torch():
        setattr(place, name, behind(getattr(place, name)))


def _places_of_torch() -> list[tuple[Any, str]]:
    """Return the functions in which trainers and ranks call torch: their owners and names."""
    import train_funcs
    from lockstep.exchange.transport import SharedRows
    from lockstep.hosts.hierarchical import HierarchicalTransport
    from lockstep.hosts.network import HostNetwork
    from lockstep.network.arena import Arena
    from lockstep.network.factors import Factors
    from lockstep.network.gradients import Gradients
    from lockstep.network.optimizer import ShardedUpdater, Updater
    from lockstep.network.replica import Replica
    from lockstep.sync import assembling, unsynchronized
    from lockstep.sync.elastic import ElasticRule
    from lockstep.sync.gossip import GossipRule
    from lockstep.sync.outer import OuterRule

    return [
        (Replica, "forward_backward"),
        (Updater, "step"),
        (HostNetwork, "sum"),
        (HostNetwork, "sum_with_row"),
        (HostNetwork, "gather"),
        (HierarchicalTransport, "_scale"),
        (Gradients, "complete"),
        (Factors, "collect"),
        (ShardedUpdater, "average"),
        (ShardedUpdater, "step"),
        (ShardedUpdater, "norms"),
        (ShardedUpdater, "use_norms"),
        (ShardedUpdater, "finish"),
        (SharedRows, "exchange"),
        (SharedRows, "rows"),
        (OuterRule, "_step"),
        (ElasticRule, "_move"),
        (GossipRule, "_blend"),
        (assembling, "in_host_memory"),
        (unsynchronized, "in_host_memory"),  # which has the function by its name
        (Replica, "count_errors"),
        (Replica, "log_probabilities"),
        (Arena, "digests"),
        (Arena, "state"),
        (train_funcs.Trainer, "save"),
        *(
            [(sys.modules["lockstep.synk.gpu"].RankGpu, "compute")]
            if "lockstep.synk.gpu" in sys.modules
            else []
        ),
    ]
