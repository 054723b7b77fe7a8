"""The program on GPUs, as a user runs it, on the simulated driver: it trains to the same bits as on CPUs.

torch computes on the host here, so what is compared is everything else: memory, loading, kernels, exchange,
their order, and how runs end.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Program, Running
from saved import assert_same, tensors
from simulated import Simulation

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
ONE_DEVICE, TWO_DEVICES = "[cuda:0, cuda:0]", "[cuda:0, cuda:1]"
STRIDED = """
from torch import nn

class Net(nn.Sequential):
    input_size, input_scale = 31, 1 / 64

    def __init__(self, n_classes):
        super().__init__(nn.Conv2d(3, 8, 7, 4, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(n_classes))
"""


@pytest.fixture(scope="module")
def on_cpus(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return Program(shared_folder, tmp_path_factory.mktemp("cpu")).run("n_epochs=2")


@pytest.mark.parametrize(
    ("words", "devices", "fault", "notice"),
    [
        pytest.param(
            (), ONE_DEVICE, "", "exchange: peer to peer: all 2 pairs proven", marks=pytest.mark.slow
        ),
        (("augment_on=loader",), TWO_DEVICES, "", "exchange: peer to peer: all 2 pairs proven"),
        pytest.param(
            ("upload=trainer",),
            ONE_DEVICE,
            "",
            "exchange: peer to peer: all 2 pairs proven",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("para_load=false",),
            TWO_DEVICES,
            "lost",
            "exchange: staged through host memory: of 16,777,216 numbers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("exchange=swap",), TWO_DEVICES, "", "exchange: swap: all 2 pairs proven", marks=pytest.mark.slow
        ),
    ],
)
def test_gpus_train_to_the_bits_of_cpus(
    program: Program,
    simulation: Simulation,
    on_cpus: Running,
    words: tuple[str, ...],
    devices: str,
    fault: str,
    notice: str,
) -> None:
    settings = {"delay": 300, **({fault: "0-1"} if fault else {})}
    environment = simulation.set(**settings).environment()
    running = program.run("n_epochs=2", *words, devices=devices, environment=environment)
    assert notice in running.output()
    assert_same(tensors(running, 2), tensors(on_cpus, 2))
    running.assert_nothing_left()
    assert list(simulation.folder.glob("memory-*")) == []  # closed and freed, in the right order
    assert running.shared_files() == []


@pytest.mark.slow
def test_a_killed_loader_is_started_again_where_the_trainer_uploads(
    program: Program, simulation: Simulation
) -> None:
    words, environment = ("n_epochs=5", "snapshot_freq=5"), simulation.environment()
    gpu = ("upload=trainer", "loader_restarts=1")
    running = program.start(*words, *gpu, devices="[cuda:0]", environment=environment)
    running.wait_for_text("epoch 1 step 2/12")
    os.kill(running.pids()["loader 0"], signal.SIGKILL)
    assert running.wait() == 0, running.output()
    assert "it is started again (restarts left: 0)" in running.output()
    assert_same(tensors(running, 5), tensors(program.run(*words, name="cpu", devices="[cpu]"), 5))
    running.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16", "kernels=dropout"),
        ("minibatch=16", "parts=4", "optimizer=lars"),
        ("rule=gradients",),
        ("model=resnet20", "model_args={n: 1}", "sync_batch_norm=true", "rule=gradients"),
        ("rule=outer", "rule_args={every: 2}"),
        ("rule=elastic", "rule_args={every: 2}"),
        (
            "optimizer=adamw",
            "learning_rate=0.001",
            "accumulate=2",
            "ema_decay=0.9",
            "scale=0.5",
            "clip_norm=1",
        ),
        ("model=resnet20", "model_args={n: 1}", "subtract_mean=[9, 8, 7]", "augment_on=loader"),
    ],
    ids=["bf16", "parts", "gradients", "statistics of all", "outer", "elastic", "adamw", "resnet20"],
)
def test_other_steps_train_to_the_bits_of_cpus(
    program: Program, simulation: Simulation, words: tuple[str, ...]
) -> None:
    words = ("n_epochs=2", *words)
    ours = program.run(*words, devices=ONE_DEVICE, name="gpu", environment=simulation.environment())
    theirs = program.run(*words, name="cpu")
    assert_same(tensors(ours, 2), tensors(theirs, 2))
    assert {array.dtype for array in tensors(ours, 2).values() if array.dtype.kind == "f"} == {np.dtype("f4")}


def ways(running: Running) -> dict[str, str]:
    """Which way each part was computed, as the log has it."""
    events = map(json.loads, (running.run_folder / "log.jsonl").read_text().splitlines())
    (found,) = [event["ways"] for event in events if event["event"] == "ways"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("augment_on", "kernels"), [("trainer", "all"), ("loader", "blocks"), ("loader", "none")]
)
def test_pictures_in_blocks_train_to_the_bits_of_cpus(
    program: Program, simulation: Simulation, tmp_path: Path, augment_on: str, kernels: str
) -> None:
    """In training, in its validation, and in validate.py."""
    (tmp_path / "strided.py").write_text(STRIDED)
    simulated = simulation.environment()
    simulated["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    on_host = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = ("n_epochs=1", "model=strided:Net", "conv_forms=space_to_depth", "rand_mirror=true")
    more = f"augment_on={augment_on}", f"kernels={kernels}"
    ours = program.run(*words, *more, devices="[cuda:0]", name="gpu", environment=simulated)
    theirs = program.run(*words, devices="[cpu]", name="cpu", environment=on_host)
    assert_same(tensors(ours, 1), tensors(theirs, 1))
    taken = "torch, by kernels: none" if kernels == "none" else "our kernel"
    assert ways(ours)["blocks"] == taken and ways(theirs)["blocks"] == "torch, on CPUs"
    assert ways(ours)["augment"] == f"our kernel, in the {augment_on}"
    assert ways(ours)["conv_forms"] == ways(theirs)["conv_forms"] == "space_to_depth: 0"
    assert ways(ours)["cuda_graph"].startswith("not captured: on CPUs")  # as far as torch knows
    command = [sys.executable, str(ROOT / "validate.py"), str(ours.run_folder)]
    answers = set()
    for device, environment in (("cuda:0", simulated), ("cpu", on_host)):
        words = (*command, f"devices=[{device}]")
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "can't be had" not in done.stderr, done.stderr
        answers.add(done.stdout.splitlines()[0])
    assert len(answers) == 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["[cuda:0]", TWO_DEVICES])
def test_sgd_in_our_kernel_is_that_of_cpus_to_rounding(
    program: Program, simulation: Simulation, devices: str
) -> None:
    """It computes as torch does on GPUs, whose last bits are not those of CPUs."""
    words, places = ("n_epochs=1", "precision=bf16"), devices.count("cuda")
    ours = program.run(*words, devices=devices, name="gpu", environment=simulation.environment())
    theirs = program.run(*words, devices=f"[{', '.join(['cpu'] * places)}]", name="cpu")
    for name, expected in tensors(theirs, 1).items():
        found = tensors(ours, 1)[name].astype(float)
        assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected) + 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("clip_norm=1",),
        ("minibatch=16", "parts=4"),
        ("model=resnet20", "model_args={n: 1}", "sync_batch_norm=true"),
    ],
    ids=["clipped", "parts", "statistics of all"],
)
def test_gradients_through_host_memory_train_to_the_bits_of_cpus(
    program: Program, simulation: Simulation, words: tuple[str, ...]
) -> None:
    words = ("n_epochs=2", "rule=gradients", *words)
    environment = simulation.set(delay=300).environment()
    ours = program.run(*words, "exchange=staged", devices=TWO_DEVICES, name="gpu", environment=environment)
    assert_same(tensors(ours, 2), tensors(program.run(*words, name="cpu"), 2))


@pytest.mark.slow
def test_a_run_that_names_no_devices_takes_the_gpus_and_goes_on_there(
    program: Program, simulation: Simulation, on_cpus: Running
) -> None:
    environment = simulation.environment()
    every_step = "save_minutes=1e-9"
    first = program.run("n_epochs=1", every_step, devices="[]", environment=environment)
    text = first.output()
    assert "devices: cuda:0, cuda:1; all visible GPUs" in text
    assert "simulated device 1, 0000:02:00.0" in text
    for path in (first.run_folder / "checkpoints").glob("epoch_0001.*"):
        path.unlink()  # it goes on from within the epoch
    second = program.run("n_epochs=2", "resume_train=true", devices=TWO_DEVICES, environment=environment)
    assert "checkpoints/epoch_0001_at_" in second.output()
    assert_same(tensors(second, 2), tensors(on_cpus, 2))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 1", pytest.param("loader 0", marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_run_and_is_named(
    program: Program, simulation: Simulation, victim: str
) -> None:
    running = program.start("n_epochs=500", devices=ONE_DEVICE, environment=simulation.environment())
    running.wait_for_text("epoch 3 ")
    assert running.shared_files()  # else what follows shows nothing
    os.kill(running.pids()[victim], signal.SIGKILL)
    assert running.wait(10) == 1
    assert running.last_line().startswith(f"lockstep: {victim} (pid ")
    assert "was killed by SIGKILL" in running.last_line()
    running.assert_nothing_left()
    assert running.shared_files() == []


@pytest.mark.slow
def test_where_nothing_can_be_shared_a_lone_trainer_runs_and_a_loader_is_refused(
    program: Program, simulation: Simulation, on_cpus: Running, tmp_path: Path
) -> None:
    environment = simulation.set(no_ipc=1).environment()
    alone = program.run("n_epochs=1", "para_load=false", devices="[cuda:0]", environment=environment)
    assert alone.last_line().startswith("done")
    words = ("n_epochs=1", "upload=trainer")
    uploading = program.run(*words, devices="[cuda:0]", name="up", environment=environment)
    assert_same(tensors(uploading, 1), tensors(alone, 1))
    staged = program.run(
        "n_epochs=2", "para_load=false", devices=TWO_DEVICES, name="two", environment=environment
    )
    assert "exchange: staged through host memory" in staged.output()
    assert_same(tensors(staged, 2), tensors(on_cpus, 2))
    for fault in ({"no_ipc": 1}, {"shm": tmp_path / "missing"}):
        environment = simulation.set(**fault).environment()
        words = program.run("n_epochs=1", devices="[cuda:0]", name="loader", code=2, environment=environment)
        line = words.last_line()
        assert "can't be shared between processes" in line and "/dev/shm" in line
        assert "upload: trainer" in line
        assert "--ipc=host" in line and "para_load: false" in line


@pytest.mark.slow
def test_a_full_gpu_is_named_with_what_to_lower(program: Program, simulation: Simulation) -> None:
    environment = simulation.set(memory=64 << 20).environment()
    words = ("batch_size=8192", "n_epochs=1")
    running = program.run(*words, devices="[cuda:1]", code=2, environment=environment)
    line = running.last_line()
    assert "(minibatches) on cuda:1 (simulated device 1, 0000:02:00.0)" in line
    assert "of 64 MiB are free; lower batch_size or n_slots" in line


@pytest.mark.parametrize("word", ["precision=tf32", "cuda_graph=true", "exchange=staged"])
def test_what_only_gpus_have_is_refused_on_cpus(program: Program, word: str) -> None:
    running = program.run(word, code=2)
    key, _, value = word.partition("=")
    assert running.last_line().startswith(
        f"lockstep: {key}: {value.replace('true', 'True')} is for GPUs only"
    )
