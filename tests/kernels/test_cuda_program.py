"""The program on GPUs as a user runs it, on the simulated driver: it trains to the same bits as on CPUs.

torch computes on the host here. So the tests compare everything else: memory, loading, kernels, exchange,
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
from conftest import ROOT, Program, Running, wait_until
from saved import assert_same, tensors
from simulated import Simulation

from lockstep.launch import resize as resize_command

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
            ("upload=loader",),
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
    again = "loader_restarts=1"
    running = program.start(*words, again, devices="[cuda:0]", environment=environment)
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
        ("precision=bf16", "custom_kernels=dropout"),
        ("global_batch_size=16", "logical_ranks=4", "optimizer=lars"),
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


def implementations(running: Running) -> dict[str, str]:
    """Return how each part was computed, from the run's log."""
    events = map(json.loads, (running.run_folder / "log.jsonl").read_text().splitlines())
    (found,) = [event["implementations"] for event in events if event["event"] == "implementations"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("augment_on", "kernels"), [("trainer", "all"), ("loader", "none")])
def test_pictures_in_blocks_train_to_the_bits_of_cpus(
    program: Program, simulation: Simulation, tmp_path: Path, augment_on: str, kernels: str
) -> None:
    """Covers training, its validation, and validate.py."""
    (tmp_path / "strided.py").write_text(STRIDED)
    simulated = simulation.environment()
    simulated["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    on_host = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = ("n_epochs=1", "model=strided:Net", "conv_layout=space_to_depth", "rand_mirror=true")
    more = f"augment_on={augment_on}", f"custom_kernels={kernels}"
    ours = program.run(*words, *more, devices="[cuda:0]", name="gpu", environment=simulated)
    theirs = program.run(*words, devices="[cpu]", name="cpu", environment=on_host)
    assert_same(tensors(ours, 1), tensors(theirs, 1))
    taken = "torch, by custom_kernels: none" if kernels == "none" else "CUDA kernel"
    assert implementations(ours)["blocks"] == taken and implementations(theirs)["blocks"] == "torch, on CPUs"
    assert implementations(ours)["augment"] == f"CUDA kernel, in the {augment_on}"
    assert (
        implementations(ours)["conv_layout"] == implementations(theirs)["conv_layout"] == "space_to_depth: 0"
    )
    assert implementations(ours)["cuda_graph"].startswith("not captured: on CPUs")  # as far as torch knows
    command = [sys.executable, str(ROOT / "validate.py"), str(ours.run_folder)]
    answers = set()
    for device, environment in (("cuda:0", simulated), ("cpu", on_host)):
        words = (*command, f"devices=[{device}]")
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "unavailable" not in done.stderr, done.stderr
        answers.add(done.stdout.splitlines()[0])
    assert len(answers) == 1


@pytest.mark.slow
def test_kernels_augment_to_the_bits_of_cpus_on_any_number_of_gpus(
    program: Program, simulation: Simulation
) -> None:
    """Partners of mixed images may be another trainer's. The control is a run that erases nothing."""
    words = ("n_epochs=2", "global_batch_size=16", "logical_ranks=4", "color_jitter=0.4", "mixup=0.8")
    words = (*words, "crop=random_resized", "cutmix=1", "cpu_threads=1")  # torch computes on the host
    gpu, erasing = {"environment": simulation.environment()}, "random_erasing=0.5"
    ones = program.run(*words, erasing, devices="[cuda:0]", name="one", **gpu)
    twos = program.run(*words, erasing, devices=TWO_DEVICES, name="two", **gpu)
    cpus = program.run(*words, erasing, name="cpu")
    control = program.run(*words, devices="[cuda:0]", name="control", **gpu)
    assert_same(tensors(ones, 2), tensors(twos, 2))
    assert_same(tensors(ones, 2), tensors(cpus, 2))
    made = "crop, color jitter, erasing, mixing, mean and conversion"
    assert implementations(ones)["augment"] == f"CUDA kernel, in the trainer: {made}"
    with pytest.raises(AssertionError):
        assert_same(tensors(ones, 2), tensors(control, 2))


@pytest.mark.slow
def test_what_kernels_can_not_change_stays_on_the_loaders_cores(
    program: Program, simulation: Simulation
) -> None:
    words = ("n_epochs=1", "crop=random_resized", "auto_augment=trivial", "random_erasing=0.5")
    gpu = {"environment": simulation.environment(), "devices": "[cuda:0]"}
    policy = program.run(*words, name="policy", **gpu)
    cores = program.run(*words, "augment_on=cores", name="cores", **gpu)
    assert_same(tensors(policy, 1), tensors(cores, 1))
    kernel = "mean and conversion by CUDA kernel, in the trainer"
    assert implementations(policy)["augment"] == f"images by the loader's core, erasing, {kernel}"
    assert implementations(cores)["augment"] == f"images by the loader's core, {kernel}"


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "batch_size"), [("[cuda:0]", 48), (TWO_DEVICES, 24)])
def test_sgd_in_our_kernel_is_that_of_cpus_to_rounding(
    program: Program, simulation: Simulation, devices: str, batch_size: int
) -> None:
    """The kernel computes as torch does on GPUs, whose last bits differ from those of CPUs.

    An epoch has two steps: the second uses the momenta and the bfloat16 copies that the first wrote. With
    more steps runs part: a last bit that differs rounds one copy to its other neighbour, 0.4 % away, and
    whether that happens within an epoch is up to the processor's convolutions. The control has another
    momentum.
    """
    words = ("precision=bf16", f"batch_size={batch_size}")
    ours, theirs = _on_both(program, simulation.environment(), devices, *words)
    assert '"step": 2, "n_steps": 2,' in (ours.run_folder / "log.jsonl").read_text()
    _assert_close(ours, theirs, 1e-6)
    cpus = devices.replace("cuda:0", "cpu").replace("cuda:1", "cpu")
    other = program.run("n_epochs=1", *words, "momentum=0.89", devices=cpus, name="control")
    with pytest.raises(AssertionError):
        _assert_close(ours, other, 1e-6)


@pytest.mark.slow
def test_biases_in_the_kernel_of_pooling_train_as_those_of_convolutions(
    program: Program, simulation: Simulation
) -> None:
    """In float32: bfloat16 rounds a convolution's output once more where the bias is added behind it."""
    ours, theirs = _on_both(program, simulation.set(biases=1).environment(), "[cuda:0]")
    _assert_close(ours, theirs, 1e-3)


def _on_both(
    program: Program, environment: dict[str, str], devices: str, *words: str
) -> tuple[Running, Running]:
    """Train an epoch on simulated GPUs and on as many CPUs."""
    cpus = ", ".join(["cpu"] * devices.count("cuda"))
    ours = program.run("n_epochs=1", *words, devices=devices, name="gpu", environment=environment)
    return ours, program.run("n_epochs=1", *words, devices=f"[{cpus}]", name="cpu")


def _assert_close(ours: Running, theirs: Running, tolerance: float) -> None:
    found = tensors(ours, 1)
    for name, expected in tensors(theirs, 1).items():
        distance = np.linalg.norm(found[name].astype(float) - expected)
        assert distance <= tolerance * np.linalg.norm(expected) + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("clip_norm=1",),
        ("global_batch_size=16", "logical_ranks=4"),
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


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("[cuda:0, cpu, cuda:1]", ("global_batch_size=16", "logical_ranks=8", "shares=[3, 4, 1]")),
        pytest.param("[cpu, cuda:0]", (), marks=pytest.mark.slow),
        pytest.param("[cuda:0, cpu]", ("rule=gradients", "overlap=true"), marks=pytest.mark.slow),
        pytest.param("[cuda:0, cpu]", ("precision=bf16", "custom_kernels=dropout"), marks=pytest.mark.slow),
        pytest.param("[cpu, cuda:0]", ("rule=elastic", "rule_args={every: 2}"), marks=pytest.mark.slow),
        pytest.param("[cpu, cuda:0]", ("rule=gossip",), marks=pytest.mark.slow),
        pytest.param(
            "[cuda:0, cpu]",
            ("model=resnet20", "model_args={n: 1}", "sync_batch_norm=true"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["shares", "weights", "gradients", "bf16", "elastic", "gossip", "statistics of all"],
)
@pytest.mark.slow
def test_cpus_and_gpus_in_one_run_train_to_the_bits_of_cpus(
    program: Program, simulation: Simulation, devices: str, words: tuple[str, ...]
) -> None:
    """They have the same bits here, because torch computes on the host."""
    words = ("n_epochs=2", *words)
    environment = simulation.set(delay=300).environment()
    ours = program.run(*words, devices=devices, name="mixed", environment=environment)
    assert "round differently: this is the same training up to rounding" in ours.output()
    assert "exchange: staged through host memory: between CPUs and GPUs" in ours.output()
    on_cpus = devices.replace("cuda:0", "cpu").replace("cuda:1", "cpu")
    assert_same(tensors(ours, 2), tensors(program.run(*words, devices=on_cpus, name="cpu"), 2))
    ours.assert_nothing_left()
    assert list(simulation.folder.glob("memory-*")) == []


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("exchange=p2p", "exchange: p2p is between GPUs only, and devices are cuda:0, cpu: set auto or"),
        ("recheck_every=5", "recheck_every: CPUs and GPUs round differently, so cuda:0, cpu can't be"),
    ],
)
def test_what_cpus_and_gpus_can_not_do_together_is_refused(
    program: Program, simulation: Simulation, word: str, text: str
) -> None:
    words = (word, "deterministic=true", "global_batch_size=16", "logical_ranks=4")
    environment = simulation.environment()
    refused = program.run(*words, devices="[cuda:0, cpu]", code=2, environment=environment)
    assert refused.last_line().startswith(f"lockstep: {text}")


@pytest.mark.slow
def test_a_run_that_names_no_devices_takes_the_gpus_and_goes_on_there(
    program: Program, simulation: Simulation, on_cpus: Running
) -> None:
    environment = simulation.environment()
    every_step = "checkpoint_minutes=1e-9"
    first = program.run("n_epochs=1", every_step, devices="[]", environment=environment)
    text = first.output()
    assert "devices: cuda:0, cuda:1; all visible GPUs" in text
    assert "simulated device 1, 0000:02:00.0" in text
    for path in (first.run_folder / "checkpoints").glob("epoch_0001.*"):
        path.unlink()  # it continues from within the epoch
    second = program.run("n_epochs=2", "resume_train=true", devices=TWO_DEVICES, environment=environment)
    assert "checkpoints/epoch_0001_at_" in second.output()
    assert_same(tensors(second, 2), tensors(on_cpus, 2))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 1", pytest.param("loader 0", marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_run_and_is_named(
    program: Program, simulation: Simulation, victim: str
) -> None:
    words = ("n_epochs=500", "on_failure=stop")
    running = program.start(*words, devices=ONE_DEVICE, environment=simulation.environment())
    running.wait_for_text("epoch 3 ")
    assert running.shared_files()  # else what follows shows nothing
    os.kill(running.pids()[victim], signal.SIGKILL)
    assert running.wait(10) == 1
    assert running.last_line().startswith(f"lockstep: {victim} (pid ")
    assert "was killed by SIGKILL" in running.last_line()
    running.assert_nothing_left()
    assert running.shared_files() == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("optimizer=adamw", "learning_rate=0.001")], ids=["sgd", "adamw"])
def test_a_killed_trainer_is_recovered_from_and_devices_are_added_from_memory(
    program: Program, simulation: Simulation, words: tuple[str, ...]
) -> None:
    """With adamw each trainer has a shard of the optimizer's state."""
    keys = ("n_epochs=12", "snapshot_freq=12", "global_batch_size=16", "logical_ranks=4", *words)
    running = program.start(
        *keys, "memory_checkpoint_seconds=1e-6", devices="[cuda:0]", environment=simulation.environment()
    )
    running.wait_for_text("epoch 2 ")
    request = resize_command.ask(running.run_folder, ("cuda:0", "cuda:1"), 0)
    wait_until(lambda: not resize_command.is_waiting(running.run_folder, request.number), "the answer")
    running.wait_for_text("resized: 2 trainer(s) on cuda:0, cuda:1 ")
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    assert running.wait(120) == 0, running.output()
    assert "recovered: trainer 1 (pid " in running.output()
    assert "; resumed from memory at step " in running.output()
    assert_same(tensors(running, 12), tensors(program.run(*keys, name="cpu", devices="[cpu]"), 12))
    running.assert_nothing_left()


@pytest.mark.slow
def test_where_nothing_can_be_shared_a_lone_trainer_runs_and_a_loader_is_refused(
    program: Program, simulation: Simulation, on_cpus: Running, tmp_path: Path
) -> None:
    environment = simulation.set(no_ipc=1).environment()
    single = program.run("n_epochs=1", "para_load=false", devices="[cuda:0]", environment=environment)
    assert single.last_line().startswith("done")
    uploading = program.run("n_epochs=1", devices="[cuda:0]", name="up", environment=environment)
    assert_same(tensors(uploading, 1), tensors(single, 1))
    staged = program.run(
        "n_epochs=2", "para_load=false", devices=TWO_DEVICES, name="two", environment=environment
    )
    assert "exchange: staged through host memory" in staged.output()
    assert_same(tensors(staged, 2), tensors(on_cpus, 2))
    for fault in ({"no_ipc": 1}, {"shm": tmp_path / "missing"}):
        environment = simulation.set(**fault).environment()
        words = ("n_epochs=1", "upload=loader")
        refused = program.run(*words, devices="[cuda:0]", name="loader", code=2, environment=environment)
        line = refused.last_line()
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
    assert "of 64 MiB are free. Lower batch_size (global_batch_size, if it is set)" in line


@pytest.mark.parametrize("word", ["precision=tf32", "cuda_graph=true", "exchange=staged"])
def test_what_only_gpus_have_is_refused_on_cpus(program: Program, word: str) -> None:
    running = program.run(word, code=2)
    key, _, value = word.partition("=")
    assert running.last_line().startswith(
        f"lockstep: {key}: {value.replace('true', 'True')} is for GPUs only"
    )
