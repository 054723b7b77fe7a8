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

from lockstep.comm.group import Group
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
# Only this process computes gradients, which lie outside the vectors then.
GRADIENTS_OF_ONE_RANK = """
import torch
from lockstep import synk

synk.fork(devices=["cuda:0", "cuda:0"])
tensor, net = synk.share(torch.zeros(3)), synk.share(torch.nn.Linear(2, 1))
table = synk.share(torch.nn.Embedding(3, 1, sparse=True))
synk.function(lambda: tensor, None)
synk.distribute()
synk.all_reduce(tensor)
place = tensor.device
(net(torch.ones(1, 2, device=place)) + table(torch.tensor([1], device=place))).sum().backward()
synk.close()
print(net.weight.grad.tolist(), table.weight.grad._values().tolist(), table.weight.grad.is_sparse)
print({part.device.type for part in (net.weight, net.weight.grad, table.weight.grad)})
"""
ERROR_OF_ONE_RANK = """
import os, torch
from lockstep import synk
from lockstep.synk import session

synk.fork(devices=["cuda:0", "cuda:1"])
tensor, caller = synk.share(torch.zeros(3)), os.getpid()

def spoil():
    from lockstep.synk.tensors import SharedTensor

    if os.getpid() != caller:
        SharedTensor.release_gpu = lambda self: [][0]
    return tensor

f = synk.function(spoil, None)
synk.distribute()
synk.all_reduce(tensor)
f()
(worker,) = session.current_team("a test").workers
try:
    synk.close()
except IndexError as error:
    print(error, worker.process.poll() is not None)
synk.close()
"""
SILENT_RANK = """
import os, signal, warnings
from lockstep import synk
from lockstep.synk import session, team

team.LEAVE_GPU_SECONDS = 1
synk.fork(devices=["cuda:0", "cuda:1"], timeout=1e9)
(worker,) = session.current_team("a test").workers
os.kill(worker.process.pid, signal.SIGSTOP)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    synk.close()
print(worker.process.poll(), *[warning.message for warning in caught])
"""


def test_all_variables_leave_their_gpu_before_one_is_released() -> None:
    """torch gives no gradient to a parameter on another device: weights and gradients leave in turn."""
    events: list[str] = []

    def make(name: str) -> Any:
        return SimpleNamespace(
            leave_gpu=lambda: events.append(f"move {name}"),
            release_gpu=lambda: events.append(f"release {name}"),
        )

    context = RankContext(0, 1, 0)
    context.group = Group.on_one_host(0, {})
    context.shareds = {2: make("gradients"), 1: make("weights")}
    ReleaseGpus().run(context)
    assert events == ["move weights", "move gradients", "release weights", "release gradients"]


def environment_of(simulation: Simulation, **settings: object) -> dict[str, str]:
    """Return the environment of a program on simulated GPUs that imports the repository's modules."""
    environment = simulation.set(**settings).environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    return environment


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
        ("cuda:0 cuda:1", "lost", "StagedTransport", "large_outputs or single_tensor or buffers", SUITES[0]),
        ("cuda:0 cuda:0 cuda:1", "", "PeerTransport", "test", SUITES[0]),
        ("cuda:0 cuda:1", "", "PeerTransport", "test", SUITES[1]),
    ],
)
def test_the_suite_of_callables_on_simulated_gpus(
    simulation: Simulation, devices: str, fault: str, transport: str, which: str, suite: Path
) -> None:
    settings = {"delay": 300, "all": 1, "proof_bytes": 1 << 16, **({fault: "0-1"} if fault else {})}
    environment = environment_of(simulation, **settings)
    run_suite(environment, devices, transport, which, suite)
    assert list(simulation.folder.glob("memory-*")) == [], "closed and freed, in the right order"


def run_program(program: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(100), env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_torch_leaves_a_team_s_stream_when_the_team_is_closed(simulation: Simulation) -> None:
    """The team destroys its stream, in which the caller's process could compute nothing more."""
    environment = environment_of(simulation, all=1)
    assert run_program(CLOSE_TWICE, environment) == "left cuda:0\n" * 2


MOVED = "[[1.0, 1.0]] [[1.0]] True\n{'cpu'}\n"


@pytest.mark.slow
def test_gradients_of_one_rank_are_moved_when_the_team_is_closed(simulation: Simulation) -> None:
    """If this rank failed to move them, the other would wait for it at a barrier."""
    environment = environment_of(simulation, all=1, proof_bytes=1 << 16)
    assert run_program(GRADIENTS_OF_ONE_RANK, environment) == MOVED
    assert list(simulation.folder.glob("memory-*")) == [], "all memory is freed"


@pytest.mark.gpu
def test_gradients_of_one_rank_are_moved_from_a_gpu_when_the_team_is_closed() -> None:
    for module in ("cloudpickle", "threadpoolctl"):
        pytest.importorskip(module)
    assert run_program(GRADIENTS_OF_ONE_RANK, dict(os.environ)) == MOVED


@pytest.mark.slow
def test_an_error_of_one_rank_while_the_team_is_closed_stops_the_others(simulation: Simulation) -> None:
    environment = environment_of(simulation, all=1, proof_bytes=1 << 16)
    assert run_program(ERROR_OF_ONE_RANK, environment) == "list index out of range True\n"


@pytest.mark.slow
def test_a_rank_that_does_not_leave_its_gpu_is_killed(simulation: Simulation) -> None:
    environment = environment_of(simulation, all=1)
    output = run_program(SILENT_RANK, environment)
    assert output.startswith("-9 close(): rank 1 (pid "), output
    assert "does not answer (this process waited 1 s for rank 1 (its part))" in output


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
