"""Runs that go on after a loss (`on_loss`), and those that go on where there is a checkpoint."""

import os
import signal
from pathlib import Path

import pytest
from conftest import Program, Running, make_config, wait_until
from limits import limit
from saved import assert_same, tensors

from lockstep.launch.processes import Ending
from lockstep.launch.recovery import next_try
from lockstep.runs.folder import Run


def kill_after_a_checkpoint(running: Running, victim: str) -> None:
    first = running.run_folder / "checkpoints" / "epoch_0001.json"
    wait_until(first.exists, "a checkpoint")
    os.kill(running.pids()[victim], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "devices", "left"),
    [
        (("on_loss=restart",), "[cpu, cpu]", 2),
        (("on_loss=shrink", "minibatch=16", "parts=2"), "[cpu, cpu]", 1),
    ],
    ids=["restart", "shrink"],
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
    assert "lockstep: trainer 1 (pid " in text and "was killed by SIGKILL" in text
    assert f"with {left} trainer(s), restart 1 of 3" in text
    assert_same(tensors(running, 12), tensors(unbroken, 12))
    running.assert_nothing_left()


@pytest.mark.slow
def test_after_a_hang_a_run_goes_on_to_the_bits_of_the_unbroken_one(program: Program) -> None:
    """In the midst of a step, in which trainers meet in each layer of batch normalisation."""
    deadline = round(limit(6))
    network = "model=resnet20", "model_args={n: 1}", "sync_batch_norm=true"
    words = (*network, "n_epochs=12", "snapshot_freq=1", "cpu_threads=1", "on_loss=restart")
    unbroken = program.run(*words, name="unbroken")
    assert "not exactly one" not in unbroken.output()
    running = program.start(*words, f"wait_deadline={deadline}", name="broken")
    first = running.run_folder / "checkpoints" / "epoch_0001.json"
    wait_until(first.exists, "a checkpoint")
    os.kill(running.pids()["trainer 1"], signal.SIGSTOP)
    assert running.wait(120) == 0, running.output()
    text = running.output()
    assert "lockstep: trainer 1 (pid " in text and "has stood still for " in text
    assert "with 2 trainer(s), restart 1 of 3" in text
    assert_same(tensors(running, 12), tensors(unbroken, 12))
    running.assert_nothing_left()


@pytest.mark.parametrize(
    ("parts", "lost", "left"), [(8, "trainer 1", ["a", "c"]), (None, "loader 0", ["b", "c", "d"])]
)
def test_what_is_left_of_four_shares_the_work(
    tmp_path: Path, parts: int | None, lost: str, left: list[str]
) -> None:
    """With parts, the largest power of two of them."""
    keys = {"minibatch": 16, "parts": parts, "on_loss": "shrink", "devices": ["a", "b", "c", "d"]}
    with open(tmp_path / "lock", "w") as lock:
        run = Run(tmp_path, None, [], lock)
    found = next_try(make_config(**keys), run, Ending(1, lost=lost), 0)
    assert found and list(found[0].devices) == left and found[0].batch_size == -(-16 // len(left))
    assert f"with {len(left)} trainer(s), restart 1 of 3" in found[1].notices[0]


@pytest.mark.slow
def test_a_run_that_is_lost_too_often_ends(program: Program) -> None:
    running = program.start("n_epochs=500", "on_loss=restart", "restarts=1", "snapshot_freq=1")
    kill_after_a_checkpoint(running, "trainer 0")
    wait_until(lambda: running.output().count("starting: ") == 2, "the restart")
    os.kill(running.pids()["trainer 0"], signal.SIGKILL)
    assert running.wait(20) == 1
    assert running.last_line().startswith("lockstep: trainer 0 (pid ")


@pytest.mark.slow
def test_a_users_error_is_no_loss(program: Program) -> None:
    running = program.run("learning_rate=1e30", "on_loss=restart", code=2)
    assert "lower learning_rate" in running.last_line() and "restart 1" not in running.output()


@pytest.mark.slow
def test_auto_begins_and_goes_on(program: Program) -> None:
    words = ("resume_train=auto", "snapshot_freq=1")
    first = program.run("n_epochs=1", *words)
    second = program.run("n_epochs=2", *words)
    assert "going on from" not in first.output() and "going on from" in second.output()
    assert_same(tensors(second, 2), tensors(program.run("n_epochs=2", name="unbroken"), 2))


@pytest.mark.slow
def test_replicas_that_cant_go_on_each_in_its_trainer_are_told(program: Program) -> None:
    words = ("rule=gossip", "resume_train=auto", "snapshot_freq=1")
    program.run("n_epochs=1", *words)
    same = program.run("n_epochs=2", *words)
    fewer = program.run("n_epochs=3", *words, devices="[cpu]")
    told = "the checkpoint has 2 replicas of rule: gossip: all begin with their mean"
    assert told in fewer.output() and "replicas of rule" not in same.output()
