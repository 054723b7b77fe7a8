"""Runs that resume after a failure (`on_failure`), and runs that resume where a checkpoint exists."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Program, Running, make_config, wait_until
from limits import limit
from saved import assert_same, tensors

from lockstep.launch.attempts import Attempt, Failures, next_attempt
from lockstep.launch.children import ExitStatus
from lockstep.runs.checkpoint_files import find_checkpoint
from lockstep.runs.folder import RunFolder, open_run
from lockstep.runs.state import Checkpoint, State

EVERY_STEP = ("memory_checkpoint_seconds=1e-6",)


def events(running: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (running.run_folder / "log.jsonl").read_text().splitlines()]


def kill_after_a_checkpoint(running: Running, victim: str) -> None:
    first = running.run_folder / "checkpoints" / "epoch_0001.json"
    wait_until(first.exists, "a checkpoint")
    os.kill(running.pids()[victim], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "devices", "left"),
    [
        ((), "[cpu, cpu]", 2),
        (("memory_checkpoint_seconds=null",), "[cpu, cpu]", 2),
        (("optimizer=adamw", "learning_rate=0.001", *EVERY_STEP), "[cpu, cpu]", 2),
        (("rule=outer", "rule_args={every: 2}", *EVERY_STEP), "[cpu, cpu]", 2),
        (("rule=elastic", "rule_args={every: 2}", *EVERY_STEP), "[cpu, cpu]", 2),
        (("rule=gossip", *EVERY_STEP), "[cpu, cpu, cpu]", 3),
        (("on_failure=shrink", "global_batch_size=16", "logical_ranks=4"), "[cpu, cpu, cpu]", 2),
    ],
    ids=["restart", "restart from the disk", "gradients", "outer", "elastic", "gossip", "shrink"],
)
def test_after_a_loss_a_run_goes_on_to_the_bits_of_the_unbroken_one(
    program: Program, words: tuple[str, ...], devices: str, left: int
) -> None:
    words = ("n_epochs=12", "snapshot_freq=1", "cpu_threads=1", *words)
    unbroken = program.run(*words, devices=devices, name="unbroken")
    running = program.start(*words, devices=devices, name="broken")
    kill_after_a_checkpoint(running, "trainer 1")
    assert running.wait(60) == 0, running.output()
    text = running.output()
    (line,) = [line for line in text.splitlines() if line.startswith("recovered: trainer 1 (pid ")]
    source = "epoch_00" if "memory_checkpoint_seconds=null" in words else "memory"
    assert "was killed by SIGKILL" in line and f"; resumed from {source}" in line
    assert f" with {left} trainer(s) in " in line
    (event,) = [each for each in events(running) if each["event"] == "recovered"]
    assert event["lost"] == "trainer 1" and event["trainers"] == left and event["steps_repeated"] >= 0
    assert_same(tensors(running, 12), tensors(unbroken, 12))
    running.assert_nothing_left()


@pytest.mark.slow
def test_after_a_hang_a_run_goes_on_to_the_bits_of_the_unbroken_one(program: Program) -> None:
    """In the midst of a step, in which trainers synchronize in each layer of batch normalisation."""
    deadline = round(limit(6))
    network = "model=resnet20", "model_args={n: 1}", "sync_batch_norm=true"
    words = (*network, "n_epochs=12", "snapshot_freq=1", "cpu_threads=1")
    unbroken = program.run(*words, name="unbroken")
    assert "not exactly one" not in unbroken.output()
    running = program.start(*words, f"timeout={deadline}", name="broken")
    first = running.run_folder / "checkpoints" / "epoch_0001.json"
    wait_until(first.exists, "a checkpoint")
    os.kill(running.pids()["trainer 1"], signal.SIGSTOP)
    assert running.wait(120) == 0, running.output()
    text = running.output()
    assert "recovered: trainer 1 (pid " in text and "has stood still for " in text
    assert_same(tensors(running, 12), tensors(unbroken, 12))
    running.assert_nothing_left()


@pytest.mark.parametrize(
    ("parts", "lost", "left"), [(8, "trainer 1", ["a", "c", "d"]), (None, "loader 0", ["b", "c", "d"])]
)
def test_what_is_left_of_four_shares_the_work(
    tmp_path: Path, parts: int | None, lost: str, left: list[str]
) -> None:
    """With logical ranks, in equal shares, since a list of shares is for the devices of before."""
    shares = {"shares": (5, 1, 1, 1)} if parts else {}
    keys = {
        **shares,
        "global_batch_size": 16,
        "logical_ranks": parts,
        "on_failure": "shrink",
        "devices": ["a", "b", "c", "d"],
    }
    with open(tmp_path / "lock", "w") as lock:
        run = RunFolder(tmp_path, None, [], lock)
    found = next_attempt(Attempt(make_config(**keys), run), ExitStatus(1, lost=lost), 0)
    assert found and list(found.config.devices) == left and found.config.batch_size == 6
    assert found.config.shares == "equal"


@pytest.mark.parametrize(("rule", "notes"), [("elastic", ["all begin with their centre"]), ("local", [])])
def test_replicas_that_a_smaller_run_discards_are_noted(tmp_path: Path, rule: str, notes: list[str]) -> None:
    keys = {"rule": rule, "global_batch_size": 16, "on_failure": "shrink", "devices": ["a", "b", "c"]}
    config = make_config(**keys)
    state = State.now(1, 32, 90, 0.1, [], 3, config)
    with open(tmp_path / "lock", "w") as lock:
        run = RunFolder(tmp_path, Checkpoint(tmp_path / "epoch_0001_at_32.safetensors", state), [], lock)
    found = next_attempt(Attempt(config, run), ExitStatus(1, lost="trainer 1"), 0)
    assert found and [note.rpartition(": ")[2] for note in found.run.notes] == notes


def test_processes_learn_how_often_the_run_has_failed(tmp_path: Path) -> None:
    failures = Failures()
    assert failures.rate.mean_seconds() is None
    for step in (5, 9):
        failures.add(ExitStatus(1, lost="trainer 0"), step)
        failures.is_counted = False
    with open(tmp_path / "lock", "w") as lock:
        attempt = Attempt(make_config(), RunFolder(tmp_path, None, [], lock))
    seconds = attempt.plan(None, True, failures.rate).failure_rate.mean_seconds()
    assert seconds is not None and 0 < 2 * seconds <= time.monotonic() - failures.rate.begin


def test_failures_without_progress_are_counted_once_each() -> None:
    failures, lost = Failures(), ExitStatus(1, lost="trainer 0")
    assert failures.add(lost, 5) == 0
    failures.is_counted = False
    assert failures.add(lost, 5) == 1
    assert failures.add(lost, 5) == 1  # the loss of a host followed
    failures.is_counted = False
    assert failures.n_before(5) == 2
    assert failures.n_before(6) == 0  # a step was completed meanwhile
    assert failures.rate.n == 2
    assert failures.add(lost, 6) == 0
    failures.is_counted = False
    assert failures.add(lost, 6) == 1


@pytest.mark.slow
def test_a_run_that_is_lost_too_often_ends(program: Program) -> None:
    """The network dies at its third step, each time: a second restart would not come further."""
    words = ("model=small_networks:DiesAtThirdStep", "max_restarts=2", "memory_checkpoint_seconds=null")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    running = program.run(*words, environment=environment, code=1)
    assert running.last_line().startswith("lockstep: trainer ") and "SIGSEGV" in running.last_line()
    assert len([each for each in events(running) if each["event"] == "started"]) == 3


@pytest.mark.slow
def test_restarts_with_progress_between_them_are_not_limited(program: Program) -> None:
    words = ("n_epochs=14", "snapshot_freq=100", "max_restarts=1", "cpu_threads=1")
    unbroken = program.run(*words, name="unbroken")
    running = program.start(*words, name="broken")
    for number in range(3):
        validated = f"epoch {3 * number + 2}/14: validation"
        running.wait_for_text(validated)
        os.kill(running.pids()[f"trainer {number % 2}"], signal.SIGKILL)
        n_recovered = number + 1
        wait_until(lambda n=n_recovered: running.output().count("\nrecovered: ") == n, "the recovery")
    assert running.wait() == 0, running.output()
    assert_same(tensors(running, 14), tensors(unbroken, 14))


@pytest.mark.slow
def test_recoveries_leave_no_descriptors_in_the_launcher(program: Program) -> None:
    running = program.start("n_epochs=100000", "snapshot_freq=100000", "cpu_threads=1")
    running.wait_for_text("step 2/6")
    descriptors = Path(f"/proc/{running.process.pid}/fd")
    n_before = len(list(descriptors.iterdir()))
    for number in range(3):
        os.kill(running.pids()["trainer 1"], signal.SIGKILL)
        n_recovered = number + 1
        wait_until(lambda n=n_recovered: running.output().count("\nrecovered: ") == n, "the recovery")
    wait_until(lambda: len(list(descriptors.iterdir())) <= n_before, "the launcher to close descriptors", 10)


@pytest.mark.slow
def test_a_users_error_is_no_loss(program: Program) -> None:
    running = program.run("learning_rate=1e30", code=2)
    assert "lower learning_rate" in running.last_line() and "recovered" not in running.output()


@pytest.mark.slow
def test_auto_begins_and_goes_on(program: Program) -> None:
    words = ("resume_train=auto", "snapshot_freq=1")
    first = program.run("n_epochs=1", *words)
    second = program.run("n_epochs=2", *words)
    assert "resuming from" not in first.output() and "resuming from" in second.output()
    assert_same(tensors(second, 2), tensors(program.run("n_epochs=2", name="unbroken"), 2))


@pytest.mark.parametrize(
    ("words", "text"),
    [(("n_epochs=1",), "raise n_epochs"), (("learning_rate=1e-9", "patience=1"), "raise patience")],
)
def test_a_complete_run_is_no_failure_for_auto(program: Program, words: tuple[str, ...], text: str) -> None:
    program.run(*words, "resume_train=auto", devices="[cpu]")
    again = program.run(*words, "resume_train=auto", devices="[cpu]")
    explicit = program.run(*words, "resume_train=true", devices="[cpu]", code=2)
    assert again.last_line() == explicit.last_line() and f"{text} to train longer" in again.last_line()


@pytest.mark.slow
def test_replicas_that_cant_go_on_each_in_its_trainer_are_told(program: Program) -> None:
    words = ("rule=gossip", "resume_train=auto", "snapshot_freq=1")
    program.run("n_epochs=1", *words)
    same = program.run("n_epochs=2", *words)
    fewer = program.run("n_epochs=3", *words, devices="[cpu]")
    received = "the checkpoint has 2 replicas of rule: gossip: all begin with their mean"
    assert received in fewer.output() and "replicas of rule" not in same.output()


@pytest.mark.parametrize("on_failure", ["a restart", "a resume"])
def test_only_files_of_unfinished_checkpoints_are_removed(tmp_path: Path, on_failure: str) -> None:
    """A notebook keeps a hidden folder beside the files that it shows. Tensors count with their record."""
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    (checkpoints / ".ipynb_checkpoints").mkdir(parents=True)
    stay = [".ipynb_checkpoints", ".nfs0001", ".epoch_0003.safetensors.swp"]
    ours = [".epoch_0003.safetensors.tmp", ".epoch_0003_at_8.json.tmp", ".latest.tmp"]
    ours += [".epoch_0003.safetensors.json"]  # while another host sends it
    stay += ["mine.safetensors", "epoch_0001.safetensors.old"]
    ours += ["epoch_0003.safetensors", "epoch_0003_at_8.safetensors"]
    for name in [*stay[1:], *ours]:
        (checkpoints / name).touch()
    config = make_config(on_failure="restart", weights_dir=str(tmp_path / "runs"), run_name="run")
    if on_failure == "a resume":
        open_run(dataclasses.replace(config, resume_train=True), 90).lock.close()
    else:
        with open(tmp_path / "lock", "w") as lock:
            run = RunFolder(checkpoints.parent, None, [], lock)
            assert next_attempt(Attempt(config, run), ExitStatus(1, lost="trainer 0"), 0)
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(stay)


READ_ONLY = """
import errno, os
_unlink = os.unlink

def unlink(path, **options):
    if os.fspath(path).endswith(".latest.tmp"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    _unlink(path, **options)

os.unlink = unlink
"""  # run by every Python process that finds it first


def test_a_recovery_that_fails_is_named_after_the_loss(program: Program, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "sitecustomize.py").write_text(READ_ONLY)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "disk")}
    words = ("n_epochs=100000", "snapshot_freq=100000")
    running = program.start(*words, environment=environment)
    running.wait_for_text("step 2/6")
    (running.run_folder / "checkpoints" / ".latest.tmp").touch()
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    assert running.wait(20) == 1
    loss, failure = running.output().splitlines()[-2:]
    assert loss.startswith("lockstep: trainer 1 (pid ") and "was killed by SIGKILL" in loss
    received = "can't be written to: Read-only file system"
    assert failure == f"lockstep: the run can't resume: {running.run_folder}: {received}"
    assert "Traceback" not in running.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("n_epochs=2", "snapshot_freq=2"),
        ("n_epochs=9", "snapshot_freq=9", "patience=1", "monitor=loss", "learning_rate=1e-30"),
    ],
    ids=["n_epochs", "patience"],
)
def test_a_trainer_that_is_lost_while_it_writes_the_last_checkpoint_costs_no_checkpoint(
    program: Program, words: tuple[str, ...]
) -> None:
    """Its memory checkpoint is complete, so no step is left from which another trainer would save."""
    unbroken = program.run(*words, name="unbroken")
    running = program.start(*words, name="broken")
    wait_until((running.run_folder / "checkpoints").exists, "the run's folder")
    blocking = running.run_folder / "checkpoints" / ".epoch_0002.safetensors.tmp"
    os.mkfifo(blocking)  # opening it for writing waits for a reader
    running.wait_for_text(f"epoch 2/{words[0][-1]}: validation")
    time.sleep(limit(1))  # for the memory checkpoint
    blocking.unlink()
    os.kill(running.pids()["trainer 0"], signal.SIGKILL)
    assert running.wait(60) == 0, running.output()
    assert "resumed from memory at step 12" in running.output(), running.output()
    assert list((running.run_folder / "checkpoints").glob("epoch_0003*")) == []
    assert_same(tensors(running, 2), tensors(unbroken, 2))


@pytest.mark.slow
def test_a_trainer_that_is_lost_while_it_replaces_a_damaged_checkpoint_costs_no_checkpoint(
    program: Program,
) -> None:
    """The file of the damaged one, which the run has passed over, does not count as the new one."""
    words = ("n_epochs=2", "snapshot_freq=1", *EVERY_STEP)
    unbroken = program.run(*words, name="unbroken")
    running = program.run(*words, name="broken")
    checkpoints = running.run_folder / "checkpoints"
    os.truncate(checkpoints / "epoch_0002.safetensors", 1000)
    running = program.start(*words, "resume_train=true", name="broken")
    running.wait_for_text("passing over a checkpoint")
    blocking = checkpoints / ".epoch_0002.safetensors.tmp"
    os.mkfifo(blocking)  # opening it for writing waits for a reader
    running.wait_for_text("epoch 2/2: validation")
    time.sleep(limit(1))  # for the memory checkpoint
    blocking.unlink()
    os.kill(running.pids()["trainer 0"], signal.SIGKILL)
    assert running.wait(60) == 0, running.output()
    assert_same(tensors(running, 2), tensors(unbroken, 2))


@pytest.mark.slow
def test_a_run_does_not_resume_with_an_edited_network(program: Program, tmp_path: Path) -> None:
    """A user may edit the file for the next experiment while the run trains. What the run has is saved."""
    network = tmp_path / "networks" / "edited.py"
    network.parent.mkdir()
    network.write_text("from models.smallnet import Model as Net\n")
    environment = {**os.environ, "PYTHONPATH": str(network.parent)}
    words = ("model=edited:Net", "snapshot_freq=100000", "global_batch_size=16", *EVERY_STEP)
    running = program.start(*words, "n_epochs=100000", environment=environment)
    running.wait_for_text("epoch 2")
    network.write_text("from models.smallnet import Model as Net  # edited\n")
    changed = f"{network}: the file of the network has changed since the run started"
    command = [sys.executable, "-m", "lockstep.launch.resize", str(running.run_folder), "+1"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(30))
    assert refused.returncode == 2 and f"refused: {changed}" in refused.stderr
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    assert running.wait(60) == 1
    loss, refusal = running.output().splitlines()[-2:]
    assert "trainer 1 (pid " in loss and refusal.startswith(f"lockstep: the run can't resume: {changed}")
    epoch = find_checkpoint(running.run_folder, "latest")[0].state.epoch
    again = ("resume_train=true", f"n_epochs={epoch + 1}")
    resumed = program.run(*words, *again, environment=environment)
    assert f"note: {changed}" in resumed.output() and "continues with the changed file" in resumed.output()


FUNCTIONS = """
import torch

def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

def augmentation(image, rng):
    return image
"""


@pytest.mark.slow
@pytest.mark.parametrize(("key", "victim"), [("loss", "trainer 1"), ("augmentation", "loader 1")])
def test_a_run_does_not_resume_with_an_edited_function(
    program: Program, tmp_path: Path, key: str, victim: str
) -> None:
    """One process that is started again would import another function than the others have."""
    path = tmp_path / "functions" / "edited_functions.py"
    path.parent.mkdir()
    path.write_text(FUNCTIONS)
    environment = {**os.environ, "PYTHONPATH": str(path.parent)}
    words = (f"{key}=edited_functions:{key}", "n_epochs=100000", "snapshot_freq=100000", *EVERY_STEP)
    running = program.start(*words, environment=environment)
    running.wait_for_text("epoch 3")
    path.write_text(FUNCTIONS + "# edited\n")
    os.kill(running.pids()[victim], signal.SIGKILL)
    assert running.wait(60) == 1, running.output()
    changed = f"{path}: the file of the {key} has changed since the run started"
    assert running.last_line().startswith(f"lockstep: the run can't resume: {changed}")
    assert find_checkpoint(running.run_folder, "latest")[0].state.epoch > 1
