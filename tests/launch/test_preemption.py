"""A machine that is taken away: SIGTERM with `preempt_seconds`, and the launcher that comes after."""

import fcntl
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, Program, make_config, wait_until
from limits import limit
from saved import assert_same, tensors

from lockstep.runs.checkpoint_files import find_checkpoint
from lockstep.runs.folder import await_end

SLOW = ("model=small_networks:StopsAtSixthStep", "cpu_threads=1", "memory_checkpoint_seconds=1e-6")


def environment(stands_still: bool) -> dict[str, str]:
    places = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    return {**places, "STAND_STILL": "1"} if stands_still else places


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["[cpu, cpu]", "[cpu]"], ids=["two", "one"])
def test_a_step_that_takes_too_long_is_left_out_of_what_is_saved(program: Program, devices: str) -> None:
    """The memory checkpoint is written to the disk instead, from which the run resumes to the same bits."""
    seconds = min(limit(4), 60)  # less than `timeout`, after which the trainer counts as hanging
    words = (*SLOW, "n_epochs=3", f"preempt_seconds={seconds:g}", "snapshot_freq=3")
    running = program.start(*words, devices=devices, environment=environment(True))
    running.wait_for_text("epoch 1 step 4/")
    time.sleep(2)  # it stands still in the sixth step now
    begin = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(60) == 143, running.output()
    assert time.monotonic() - begin < seconds + limit(10)
    assert "stopped as asked; saved " in running.last_line()
    running.assert_nothing_left()
    state = find_checkpoint(running.run_folder, "latest")[0].state
    assert state.epoch == 1 and 0 < state.position <= 5 * 8 * (2 if devices == "[cpu, cpu]" else 1)
    resumed = program.run(*words, "resume_train=auto", devices=devices, environment=environment(False))
    unbroken = program.run(*words, name="unbroken", devices=devices, environment=environment(False))
    assert_same(tensors(resumed, 3), tensors(unbroken, 3))


@pytest.mark.slow
def test_a_newer_checkpoint_on_the_disk_is_what_a_preempted_run_has_saved(program: Program) -> None:
    """It was written while the trainer stood still in the next step, so it could not say so.

    Epochs have five steps, so the sixth is epoch 2's first one.
    """
    words = (*SLOW, "n_epochs=2", "preempt_seconds=2", "snapshot_freq=1", "batch_size=9")
    running = program.start(*words, environment=environment(True))
    running.wait_for_text("epoch 1/2")
    record = running.run_folder / "checkpoints" / "epoch_0001.json"
    wait_until(record.exists, "the checkpoint of epoch 1")
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(60) == 143, running.output()
    assert "stopped as asked; saved " in running.last_line()
    assert "/epoch_0001.safetensors; resume_train=True resumes it" in running.last_line()
    assert [path.stem for path in record.parent.glob("*.json")] == ["epoch_0001"]
    assert running.output().count("\nsaved ") == 1


def test_a_step_that_ends_in_time_is_saved(program: Program) -> None:
    running = program.start("n_epochs=100000", "snapshot_freq=100000", "preempt_seconds=600")
    running.wait_for_text("step 4/6")
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(20) == 143
    assert "stopped as asked; saved " in running.last_line()
    running.assert_nothing_left()


@pytest.mark.slow
def test_a_run_that_is_started_while_the_one_before_ends_waits_and_resumes(program: Program) -> None:
    """Before it looks for checkpoints, which the first one is about to write."""
    words = ("n_epochs=3", "resume_train=auto", "preempt_seconds=600", "cpu_threads=1")
    folder = program.place / "runs" / "run"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = program.start(*words, name="run")
        time.sleep(limit(3))
        assert running.process.poll() is None and "starting" not in running.output()
        done = program.run("n_epochs=1", "cpu_threads=1", name="before")
        shutil.copytree(done.run_folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))
    assert running.wait() == 0, running.output()
    assert "note: waited for the run that was ending in this folder" in running.output()
    assert "resuming from " in running.output() and "epoch_0001" in running.output()


@pytest.mark.parametrize(("seconds", "waits"), [(60.0, True), (0.2, False), (None, False)])
def test_a_second_launcher_waits_for_the_first(tmp_path: Path, seconds: float | None, waits: bool) -> None:
    (tmp_path / "run").mkdir()
    config = make_config(weights_dir=str(tmp_path), run_name="run", preempt_seconds=seconds)
    with open(tmp_path / "run" / ".lock", "w") as lock:
        assert not await_end(config)  # no other has the lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        released = threading.Timer(1.0, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        released.start()
        begin = time.monotonic()
        assert await_end(config)
        assert (time.monotonic() - begin > 0.9) == waits
        released.join()
