"""Ranks on GPUs, for torch callables: test_synk_torch.py and test_synk_modules.py on the simulated driver.

The former also runs on real GPUs.

On the simulated driver torch computes on the host; what is tested is all else: memory, copies, their order,
the end.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from limits import limit
from simulated import Simulation

from lockstep.synk.context import RankContext, ReleaseGpus

SUITES = [Path(__file__).with_name(name) for name in ("test_synk_torch.py", "test_synk_modules.py")]


# The second team has lost a rank when it is closed.
CLOSE_TWICE = """
import os, signal
from lockstep import synk
from lockstep.backends import cuda
from lockstep.synk import session

cuda.stop_torch = lambda device: print("left", device)
synk.fork(devices=["cuda:0", "cuda:1"])
synk.close()
synk.fork(devices=["cuda:0", "cuda:1"])
os.kill(session.current_team("a test").workers[0].process.pid, signal.SIGKILL)
synk.close()
"""
COMPUTE_AFTERWARDS = """
import gc, torch
from lockstep import synk

synk.fork(devices=["cuda:0", "cuda:0"])
synk.close()
gc.collect()
print(torch.ones(1000, device="cuda:0").sum().item())
"""


def test_all_values_are_read_before_a_variable_leaves_its_gpu() -> None:
    """torch gives no gradient to a parameter on another device: weights and gradients leave in turn."""
    events: list[str] = []

    def make(name: str) -> Any:
        return SimpleNamespace(
            value_on_gpu=lambda: events.append(f"read {name}") or name,
            release_gpu=lambda value: events.append(f"release {value}"),
        )

    context = RankContext(0, 1, 0)
    context.shareds = {2: make("gradients"), 1: make("weights")}
    ReleaseGpus().run(context)
    assert events == ["read weights", "read gradients", "release weights", "release gradients"]


def run_suite(
    environment: dict[str, str], devices: str, transport: str, which: str = "test", suite: Path = SUITES[0]
) -> None:
    environment |= {"LOCKSTEP_TEST_DEVICES": devices, "LOCKSTEP_TEST_TRANSPORT": transport}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, str(suite)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(300), env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)  # PyCUDA is built the first time
@pytest.mark.parametrize(
    ("devices", "fault", "transport", "which", "suite"),
    [
        ("cuda:0 cuda:1", "", "PeerTransport", "large_outputs or single_tensor or buffers", SUITES[0]),
        ("cuda:0 cuda:1", "lost", "StagedTransport", "test", SUITES[0]),
        ("cuda:0 cuda:0 cuda:1", "", "PeerTransport", "test", SUITES[0]),
        ("cuda:0 cuda:1", "", "PeerTransport", "test", SUITES[1]),
    ],
)
def test_the_suite_of_callables_on_simulated_gpus(
    simulation: Simulation, devices: str, fault: str, transport: str, which: str, suite: Path
) -> None:
    settings = {"delay": 300, "all": 1, "proof_bytes": 1 << 16, **({fault: "0-1"} if fault else {})}
    environment = simulation.set(**settings).environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    run_suite(environment, devices, transport, which, suite)
    assert list(simulation.folder.glob("memory-*")) == [], "closed and freed, in the right order"


def run_program(program: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(100), env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_leaves_a_team_s_stream_when_the_team_is_closed(simulation: Simulation) -> None:
    """That stream is destroyed with the team: the caller's process could compute nothing in it."""
    environment = simulation.set(all=1).environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    assert run_program(CLOSE_TWICE, environment) == "left cuda:0\n" * 2


@pytest.mark.gpu
def test_torch_computes_on_a_gpu_after_its_team_is_closed() -> None:
    for module in ("cloudpickle", "threadpoolctl"):
        pytest.importorskip(module)
    assert run_program(COMPUTE_AFTERWARDS, dict(os.environ)) == "1000.0\n"


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_suite_of_callables_with_two_ranks_on_one_gpu() -> None:
    for module in ("cloudpickle", "threadpoolctl"):
        pytest.importorskip(module)
    run_suite(dict(os.environ), "cuda:0 cuda:0", "PeerTransport")
