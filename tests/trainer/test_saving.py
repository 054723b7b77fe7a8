"""Checkpoints by minutes, written behind the training, of which only some are kept."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Program, make_config, wait_until
from dataset_folders import write_manifest
from hypothesis import given
from hypothesis import strategies as st
from limits import limit
from safetensors.torch import load_file, save_file
from saved import assert_same, tensors

from lockstep.comm.group import World
from lockstep.comm.messages import Saved
from lockstep.data.description import Description
from lockstep.errors import UserError
from lockstep.files import checksum
from lockstep.launch.attempts import Attempt, next_attempt
from lockstep.launch.children import ExitStatus
from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.network.recorder import HostStopwatch
from lockstep.report.filters import read_filters
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint_files import find_checkpoint, records
from lockstep.runs.dataset_description import write_description
from lockstep.runs.folder import RunFolder, open_run
from lockstep.runs.plan import FailureRate, RunPlan
from lockstep.runs.retention import remove_older, remove_superseded
from lockstep.runs.snapshot import MemoryCheckpoint, Retained
from lockstep.runs.state import Checkpoint, State
from lockstep.trainer import saving
from lockstep.trainer.saving import Saver

EVERY_STEP = "checkpoint_minutes=1e-9"


def names(folder: Path) -> list[str]:
    return [record.stem for record in records(folder)]


def test_a_checkpoint_is_written_as_the_package_writes_it(tmp_path: Path) -> None:
    """The tensors have every dtype and shape, and names that JSON escapes."""
    names = ("bool", "uint8", "int8", "int16", "float16", "bfloat16", "int32", "float32", "float64", "int64")
    shapes = ((), (0, 2), (3,), (5, 7))
    tensors = {
        f"{name}/{shape}": torch.ones(shape, dtype=getattr(torch, name)) for name in names for shape in shapes
    }
    tensors |= {'a "quoted" \n é': torch.arange(12.0).view(3, 4).T, "b": torch.ones(2, requires_grad=True)}
    found = checkpoint.write(tmp_path / "ours", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert found == checksum(tmp_path / "ours")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("rule=gradients", "optimizer=adamw", "ema_decay=0.9"),
        ("rule=outer", "rule_args={every: 2}"),
        ("rule=elastic", "rule_args={every: 2}"),
    ],
    ids=["gradients", "outer", "elastic"],
)
def test_from_within_an_epoch_a_run_goes_on_to_the_bits_of_the_unbroken_one(
    program: Program, words: tuple[str, ...]
) -> None:
    """A whole run that saves at every step has the same bits as one that does not, too."""
    many_steps = ("n_epochs=2", "batch_size=2", "learning_rate=0.001")  # a slow disk saves some of them only
    words = (*many_steps, "snapshot_freq=2", "cpu_threads=1", *words)
    unbroken = program.run(*words, name="unbroken")
    saving_all = program.run(*words, EVERY_STEP, name="run")
    assert_same(tensors(saving_all, 2), tensors(unbroken, 2))
    within = [name for name in names(saving_all.run_folder) if "_at_" in name]
    assert len(within) > 1
    for name in set(names(saving_all.run_folder)) - {within[-2]}:  # so that it is the newest one
        for exit_status in (".json", ".safetensors"):
            (saving_all.run_folder / "checkpoints" / f"{name}{exit_status}").unlink()
    resumed = program.run(*words, "resume_train=true", name="run")
    assert f"resuming from {resumed.run_folder}/checkpoints/{within[-2]}.safetensors" in resumed.output()
    assert_same(tensors(resumed, 2), tensors(unbroken, 2))


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_within_its_epoch(program: Program) -> None:
    """The newest checkpoint is torn, as a disk may do it, and named."""
    words = ("n_epochs=400", "snapshot_freq=400", EVERY_STEP, "keep_checkpoints=3", "cpu_threads=1")
    running = program.start(*words, "on_failure=stop")
    checkpoints = running.run_folder / "checkpoints"
    wait_until(lambda: len(list(checkpoints.glob("*.json"))) >= 3, "three checkpoints")
    os.kill(running.pids()["trainer 0"], signal.SIGKILL)
    assert running.wait(20) == 1
    running.assert_nothing_left()
    assert len(names(running.run_folder)) <= 4  # it may have been killed before an older one was removed
    found, _ = find_checkpoint(running.run_folder, "latest")
    os.truncate(found.path, 1000)
    before, _ = find_checkpoint(running.run_folder, "latest")
    n_epochs = f"n_epochs={found.state.epoch + 1}"
    resumed = program.run(n_epochs, "resume_train=true", "checkpoint_minutes=null", "snapshot_freq=400")
    assert f"{found.path}: is damaged or half written" in resumed.output()
    assert f"resuming from {before.path}" in resumed.output()
    unbroken = program.run(n_epochs, "snapshot_freq=400", "cpu_threads=1", name="unbroken")
    assert_same(tensors(resumed, found.state.epoch + 1), tensors(unbroken, found.state.epoch + 1))


class Heard:
    """A stand-in for a trainer's ProgressReporter."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def share(self, message: object, block: object) -> None:
        self.messages.append(message)


class DeviceClock(HostStopwatch):
    """A stand-in for the stopwatch of a device that is still copying."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = False

    def is_past(self, point: float) -> bool:
        return self.is_done

    def seconds_between(self, begin: float, end: float) -> float:
        self.is_done = True
        return 10.0


def make_saver(
    folder: Path,
    stopwatch: HostStopwatch | None = None,
    retains: bool = False,
    rule_bytes: int = 0,
    failure_rate: FailureRate = FailureRate(),  # noqa: B008
    retained: Retained | None = None,
    **keys: object,
) -> tuple[Saver, Arena, Heard]:
    (folder / "checkpoints").mkdir(parents=True)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    arena, heard = Arena(model, HostMemory(), ("momenta",)), Heard()
    program = SimpleNamespace(arena=arena, optimizer=SimpleNamespace(learning_rate=0.1))
    memory = {"retains": retains, "retained": retained}
    plan = RunPlan(make_config(**keys), folder, None, failure_rate=failure_rate, **memory)  # type: ignore[arg-type]
    dataset, (world,) = SimpleNamespace(train=range(90), digest=""), World.on_one_host(1)
    saver = Saver(plan, program, heard, dataset, world=world, rule_bytes=rule_bytes, stopwatch=stopwatch)  # type: ignore[arg-type]
    return saver, arena, heard


def test_a_memory_file_of_another_size_is_closed_once_it_was_read(tmp_path: Path) -> None:
    """A run that was resized would keep the copies of before, beside its own."""
    message = MemoryCheckpoint(0, 1, 1, "", (1, 0, 0))
    saver, _, _ = make_saver(tmp_path / "first", retains=True)
    for number, (block, is_closed) in enumerate(
        [(saver._slots.block, False), (HostMemory().allocate(4096, "copies"), True)]
    ):
        make_saver(tmp_path / str(number), retains=True, retained=Retained(block, message))
        assert (block._map is None) == is_closed


class Gate:
    """Holds up the thread that writes, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.write, self.n_writes = threading.Event(), checkpoint.save, 0
        monkeypatch.setattr(saving.checkpoint, "save", self.save)

    def save(self, *arguments: object) -> Path:
        self.n_writes += 1
        self.open.wait(limit(60))
        return self.write(*arguments)  # type: ignore[arg-type]


def test_what_is_written_is_the_step_that_was_copied(tmp_path: Path, monkeypatch) -> None:
    """The training continues meanwhile: weights, counts and the record of validation change."""
    gate = Gate(monkeypatch)
    saver, arena, heard = make_saver(tmp_path, checkpoint_minutes=1e-9)
    expected = {name: tensor.clone() for name, tensor in arena.state().items()}
    val_record = [{"epoch": 1, "loss": 1.0, "error_top1": 0.5, "error_top5": 0.5}]
    wait_until(saver.is_due, "the first checkpoint to be due")
    of_rule = {"outer/0.weight": torch.ones(4)}
    saver.save(2, 32, val_record, of_rule)
    assert not saver.is_due() and heard.messages == []  # at most one is written at once
    arena.flat.add_(1)
    for counts in arena.local.values():
        counts.add_(1)
    val_record.append(val_record[0])
    gate.open.set()
    saver.finish()
    found, _ = find_checkpoint(tmp_path, "latest")
    assert heard.messages == [Saved(str(found.path))]
    assert found.path.stem == "epoch_0002_at_32" and len(found.state.val_record) == 1
    written = load_file(found.path)
    assert written.keys() == expected.keys() | of_rule.keys() and len(arena.local) == 1
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert saver.is_due() and saver.is_due()
    assert len(heard.messages) == 1


def test_nothing_is_made_of_a_copy_that_the_device_is_still_making(tmp_path: Path) -> None:
    clock = DeviceClock()
    saver, _, heard = make_saver(tmp_path, clock, retains=True, checkpoint_minutes=1e-9)
    for name in ("written at a later step", "written at the end"):
        heard.messages.clear()
        saver.save(2, 32, [], {})
        for _ in range(3):  # steps
            assert not (saver.is_due() or saver.is_copy_due()) and not heard.messages, name
        if name == "written at a later step":
            clock.is_done = True
            saver.is_due()
        saver.finish()
        whole, saved = heard.messages
        assert isinstance(whole, MemoryCheckpoint) and isinstance(saved, Saved)
        clock.is_done = False


def test_the_cost_of_a_memory_checkpoint_counts_the_time_of_the_device(tmp_path: Path) -> None:
    """It is 10 s of the stand-in, so that auto makes the next copy 1,000 s later."""
    due = []
    for name, clock in (("device", DeviceClock()), ("host", HostStopwatch())):
        saver, _, _ = make_saver(tmp_path / name, clock, retains=True)
        saver.save(1, 8, [], {}, to_disk=False)
        saver.finish()
        time.sleep(0.3)
        due.append(saver.is_copy_due())
    assert due == [False, True]


def test_frequent_failures_make_memory_checkpoints_more_frequent(tmp_path: Path) -> None:
    """One takes 10 s, so the next is due after 1,000 s; at once while failures come every nanosecond."""
    now, due = time.monotonic(), []
    rates = {
        "none": FailureRate(0, now),
        "many": FailureRate(10**9, now - 1),
        "old": FailureRate(1, now - 1e9),
    }
    for name, rate in rates.items():
        saver, _, _ = make_saver(tmp_path / name, DeviceClock(), retains=True, failure_rate=rate)
        saver.save(1, 8, [], {}, to_disk=False)
        saver.finish()
        time.sleep(0.3)
        due.append(saver.is_copy_due())
    assert due == [False, True, False]


@given(st.floats(1e-4, 100), st.floats(0.1, 1e9))
def test_the_interval_costs_least_in_copies_and_repeated_steps(cost: float, failure_seconds: float) -> None:
    """A neighbouring interval costs more, unless 1 % of the time or the least interval sets it."""
    found = saving.interval(cost, failure_seconds)
    assert 0.2 <= found <= max(0.2, saving.interval(cost, None))
    if 0.2 < found < saving.interval(cost, None):
        costs = [cost / x + x / 2 / failure_seconds for x in (found * 0.9, found, found * 1.1)]
        assert costs[1] == min(costs)


def test_a_second_one_waits_for_the_first(tmp_path: Path, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    saver, _, heard = make_saver(tmp_path)
    saver.save(1, 8, [], {})
    wait_until(lambda: gate.n_writes == 1, "the first write")
    second = threading.Thread(target=saver.save, args=(1, 16, [], {}))
    second.start()
    second.join(0.2)
    assert second.is_alive() and gate.n_writes == 1
    gate.open.set()
    second.join()
    saver.finish()
    assert gate.n_writes == len(heard.messages) == 2
    assert names(tmp_path) == ["epoch_0001_at_8", "epoch_0001_at_16"]
    assert not saver.is_due()  # without checkpoint_minutes


def test_what_goes_wrong_in_the_thread_reaches_the_trainer(tmp_path: Path, monkeypatch) -> None:
    saver, _, heard = make_saver(tmp_path, timeout=1)
    shutil.rmtree(tmp_path / "checkpoints")
    saver.save(1, 8, [], {})
    failed = r"epoch_0001_at_8\.safetensors: the checkpoint can't be written: "
    wait_until(saver.is_due, "the failure, which makes a save due")  # there is no checkpoint_minutes
    with pytest.raises(UserError, match=failed):
        saver.save(1, 16, [], {})
    saver.save(1, 8, [], {})
    with pytest.raises(UserError, match=failed):
        saver.finish()
    gate = Gate(monkeypatch)
    saver.save(1, 16, [], {})
    with pytest.raises(
        UserError, match="the checkpoint of epoch 1 at image 16 is not written after 1 s: the disk is slow"
    ):
        saver.finish()
    gate.open.set()
    assert heard.messages == []


def test_the_rules_tensors_count_for_the_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rule: gradients they are the optimizer's state, which is as large as the weights."""
    free = SimpleNamespace(free=10_000)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: free)
    make_saver(tmp_path / "weights")
    with pytest.raises(UserError, match=r"a checkpoint takes 0\.0 MB, and 0\.0 MB are free"):
        make_saver(tmp_path / "gradients", rule_bytes=10_000)


def test_a_folder_that_is_removed_while_a_run_starts_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: can't be used: No such file or directory"):
        saving._check_disk(tmp_path / "gone", 1)


@pytest.mark.slow
def test_a_run_looks_for_room_on_the_disk_before_its_first_step(program: Program) -> None:
    (program.place / "runs").mkdir()
    on_a_small_disk = f'mount -t tmpfs -o size=256k small {program.place}/runs && exec "$@"'
    unshare = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine's users may not mount a file system of their own")
    running = program.start(through=(*unshare, "sh", "-c", on_a_small_disk, "sh"), devices="[cpu]")
    assert running.wait(20) == 2
    words = r"lockstep: trainer 0: .*/runs/run: a checkpoint takes \S+ MB, and \S+ MB are free on its disk: "
    assert re.match(words, running.last_line()) and "weights_dir" in running.last_line()
    assert " step 2/" not in running.output()
    running.assert_nothing_left()


@pytest.mark.parametrize("epoch", ["bst", "1", 1.0, None, True])
def test_what_names_no_checkpoint_is_refused(tmp_path: Path, epoch: object) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_record(tmp_path, 1, 90, [0.5])
    with pytest.raises(UserError, match="is not the number of an epoch, 'best' or 'latest'"):
        find_checkpoint(tmp_path, epoch)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_that_can_save_no_more_says_why(program: Program) -> None:
    running = program.start("n_epochs=100000", "snapshot_freq=100000", EVERY_STEP)
    running.wait_for_text("saved ")
    (running.run_folder / "checkpoints").rename(running.run_folder / "elsewhere")
    assert running.wait(20) == 2
    names = r"epoch_\d+(_at_\d+)?\.(safetensors|json)|latest"
    words = rf"lockstep: trainer 0: .*/checkpoints/({names}): .*can't be .*No such file"
    assert re.match(words, running.last_line())
    running.assert_nothing_left()


def write_record(
    folder: Path,
    epoch: int,
    position: int,
    errors: list[float],
    only_best: bool = False,
    macro_f1: tuple[float, ...] = (),
) -> Path:
    """Write a checkpoint. With `macro_f1` it is of a run that monitors these values."""
    record = [{"epoch": n, "error_top1": error} for n, error in enumerate(errors, 1)]
    for entry, value in zip(record, macro_f1, strict=False):
        entry["macro_f1"] = value
    config = {"monitor": "macro_f1"} if macro_f1 else {}
    state = State(epoch, position, 90, 0.1, record, 1, config, {}, only_best=only_best)
    return checkpoint.save(folder, {"weights/a": torch.zeros(3)}, state)


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    errors: list[float] = []
    for epoch, error in enumerate((0.9, 0.2, 0.5, 0.4), 1):
        remove_older(write_record(tmp_path, epoch, 32, list(errors)), 2)
        errors.append(error)
        newest = write_record(tmp_path, epoch, 90, errors)
        remove_older(newest, 2)
        assert newest.stem in names(tmp_path)
    assert names(tmp_path) == ["epoch_0002", "epoch_0004_at_32", "epoch_0004"]
    left = {path.stem for path in (tmp_path / "checkpoints").glob("*.safetensors")}
    assert left == set(names(tmp_path))


def test_one_that_was_passed_over_does_not_count(tmp_path: Path) -> None:
    """It is later than the newest, from before a resumption; another has a record that can't be read."""
    (tmp_path / "checkpoints").mkdir()
    for epoch in (1, 2, 3):
        write_record(tmp_path, epoch, 90, [0.5] * epoch)
    (tmp_path / "checkpoints" / "epoch_0001.json").write_text("{")
    os.truncate(tmp_path / "checkpoints" / "epoch_0003.safetensors", 10)
    newest = write_record(tmp_path, 3, 8, [0.5, 0.5])
    remove_older(newest, 1)
    assert names(tmp_path) == ["epoch_0001", "epoch_0002", "epoch_0003_at_8", "epoch_0003"]
    found, notices = find_checkpoint(tmp_path, "latest")
    assert found.path == newest and "epoch_0003.safetensors: is damaged" in notices[0]


def test_only_the_best_of_those_saved_for_being_the_best_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    errors: list[float] = []
    kept = []
    for epoch, error in enumerate((0.9, 0.3, 0.4, 0.3, 0.2), 1):
        errors.append(error)
        if epoch == 4 or error < min(errors[:-1], default=1):  # 4: a regular one
            remove_superseded(write_record(tmp_path, epoch, 90, errors, only_best=epoch != 4))
        kept.append(names(tmp_path))
    assert kept == [
        ["epoch_0001"],
        ["epoch_0002"],
        ["epoch_0002"],
        ["epoch_0002", "epoch_0004"],  # of equal errors the earlier one is the best
        ["epoch_0004", "epoch_0005"],
    ]


def test_monitor_decides_which_is_the_best(tmp_path: Path) -> None:
    """The top-1 error would choose epoch 3."""
    (tmp_path / "checkpoints").mkdir()
    errors, macro_f1 = [0.5, 0.4, 0.3], (0.2, 0.9, 0.6)
    for epoch in (1, 2, 3):
        newest = write_record(tmp_path, epoch, 90, errors[:epoch], epoch < 3, macro_f1)
        remove_superseded(newest)
    assert names(tmp_path) == ["epoch_0002", "epoch_0003"]
    assert find_checkpoint(tmp_path, "best")[0].state.epoch == 2
    remove_older(newest, 1)
    assert names(tmp_path) == ["epoch_0002", "epoch_0003"]


def test_the_best_saved_one_stays_where_the_best_epoch_was_not_saved(tmp_path: Path) -> None:
    """Epoch 2 is saved by its error; resumed with `monitor: macro_f1`, the run finds epoch 3 better."""
    (tmp_path / "checkpoints").mkdir()
    errors, macro_f1 = [0.5, 0.3, 0.4, 0.6], (0.2, 0.8, 0.9, 0.3)
    remove_superseded(write_record(tmp_path, 1, 90, errors[:1], only_best=True))
    write_record(tmp_path, 2, 90, errors[:2], True, macro_f1)
    remove_superseded(write_record(tmp_path, 4, 90, errors, False, macro_f1))
    assert names(tmp_path) == ["epoch_0002", "epoch_0004"]
    found, notes = find_checkpoint(tmp_path, "best")
    assert found.state.epoch == 2 and "epoch 3 was better than 2, and has no checkpoint" in notes[0]


def test_the_best_is_found_and_a_better_one_without_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    errors = [0.5, 0.1, 0.3, 0.4]
    for epoch in (1, 3, 4):
        write_record(tmp_path, epoch, 90, errors[:epoch])
    best, notes = find_checkpoint(tmp_path, "best")
    assert best.path.stem == "epoch_0003"
    assert notes == [f"{tmp_path}: epoch 2 was better than 3, and has no checkpoint"]
    os.truncate(tmp_path / "checkpoints" / "epoch_0003.safetensors", 10)
    best, notes = find_checkpoint(tmp_path, "best")
    assert best.path.stem == "epoch_0004" and "epoch_0003.safetensors: is damaged" in notes[0]
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    write_record(tmp_path / "other", 1, 8, [])
    with pytest.raises(UserError, match="has no whole checkpoint of an epoch with a validated error_top1"):
        find_checkpoint(tmp_path / "other", "best")


def test_a_run_always_saves_its_best_epoch(program: Program) -> None:
    running = program.run("n_epochs=4", "snapshot_freq=100", "learning_rate=0.001")
    events = map(json.loads, (running.run_folder / "log.jsonl").read_text().splitlines())
    errors = [event["error_top1"] for event in events if event["event"] == "validated"]
    best = errors.index(min(errors)) + 1
    assert names(running.run_folder) == sorted({f"epoch_{best:04d}", "epoch_0004"})
    assert find_checkpoint(running.run_folder, "best")[0].state.epoch == best


@pytest.mark.slow
def test_a_run_keeps_what_it_is_told_to(program: Program) -> None:
    running = program.run("n_epochs=4", "snapshot_freq=1", "keep_checkpoints=1", devices="[cpu]")
    last = json.loads((running.run_folder / "checkpoints" / "epoch_0004.json").read_text())
    errors = [entry["error_top1"] for entry in last["val_record"]]
    best = errors.index(min(errors)) + 1
    assert names(running.run_folder) == sorted({f"epoch_{best:04d}", "epoch_0004"})


def test_a_run_lost_before_its_first_checkpoint_begins_where_it_began(tmp_path: Path) -> None:
    """It resumes from a checkpoint in another folder, say; its own has none but an unfinished one."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".epoch_0003.safetensors.tmp").write_bytes(b"unfinished")
    start = Checkpoint(tmp_path / "elsewhere.safetensors", State(2, 90, 90, 0.1, [], 1, {}, {}))
    with open(tmp_path / "lock", "w") as lock:
        run = RunFolder(tmp_path, start, ["said before"], lock)
    config = make_config(on_failure="restart")
    for began, received in ((start, "elsewhere"), (None, "the beginning")):
        attempt = Attempt(config, dataclasses.replace(run, start=began))
        again = next_attempt(attempt, ExitStatus(1, lost="trainer 0"), 0)
        assert again and again.run.start is began and again.run.notes == [] and again.source == received
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(("position", "n_validated"), [(32, 0), (90, 0), (90, 1)])
@pytest.mark.parametrize(("before", "now"), [("a", "b"), ("a", "a"), ("", "b"), ("a", "")])
def test_resuming_on_another_dataset_is_refused_within_an_epoch(
    tmp_path: Path, position: int, n_validated: int, before: str, now: str
) -> None:
    """Its end comes after its validation: there it is said. A folder without a manifest is not told apart."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    keys = {"weights_dir": str(tmp_path), "run_name": "run", "n_epochs": 3}
    record = [{"epoch": 1, "error_top1": 0.5}] * n_validated
    state = State.now(1, position, 90, 0.1, record, 1, make_config(**keys), before)
    checkpoint.save(folder, {"weights/a": torch.zeros(3)}, state)
    config = make_config(**keys, resume_train=True)
    differs = {before, now} == {"a", "b"}
    if differs and not n_validated:
        with pytest.raises(
            UserError, match=r"holds another dataset than .* within epoch 1 .*\. Set data_fol"
        ):
            open_run(config, 90, now)
        return
    run = open_run(config, 90, now)
    run.lock.close()
    assert run.start and run.start.state.dataset == before
    assert ["holds another dataset" in notice for notice in run.notes] == [True] * differs


@pytest.mark.parametrize(("position", "n_validated"), [(32, 0), (90, 0), (90, 1)])
@pytest.mark.parametrize(
    ("keys", "cure"),
    [({"data_folder": "mine"}, "Set data_folder to"), ({"data": "caller:datasets"}, "Give the datasets of")],
)
def test_resuming_on_more_images_names_both_numbers(
    tmp_path: Path, position: int, n_validated: int, keys: dict[str, str], cure: str
) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    config = make_config(weights_dir=str(tmp_path), run_name="run", n_epochs=3, resume_train=True, **keys)
    record = [{"epoch": 1, "error_top1": 0.5}] * n_validated
    state = State.now(1, position, 90, 0.1, record, 1, config, "a")
    checkpoint.save(folder, {"weights/a": torch.zeros(3)}, state)
    if not n_validated:
        name = next(iter(keys.values()))
        with pytest.raises(UserError, match=rf"epoch of 90 images, not of 1200: {name} is not .*\. {cure}"):
            open_run(config, 1200, "b")
        return
    run = open_run(config, 1200, "b")
    run.lock.close()
    assert run.notes[0] == "the dataset has 1,200 training images now, 90 before"


def test_a_branch_that_has_saved_nothing_does_not_start_from_scratch(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    keys = {"weights_dir": str(tmp_path), "run_name": "run", "n_epochs": 3, "resume_train": True}
    for epoch in (1, 2):
        record = [{"epoch": each + 1, "error_top1": 0.5} for each in range(epoch)]
        state = State.now(epoch, 90, 90, 0.1, record, 1, make_config(**keys), "")
        checkpoint.save(tmp_path / "run", {"weights/a": torch.zeros(3)}, state)
    for _ in range(2):  # begun, killed, and begun again
        run = open_run(make_config(**keys, load_epoch=1), 90)
        run.lock.close()
        assert run.folder == tmp_path / "run-from-epoch_0001" and run.start
    message = "run-from-epoch_0001: was to continue run after epoch 1, and .* run_name=run load_epoch=1"
    with pytest.raises(UserError, match=message):
        open_run(make_config(**{**keys, "run_name": "run-from-epoch_0001"}), 90)
    checkpoint.save(tmp_path / "run-from-epoch_0001", {"weights/a": torch.zeros(3)}, state)
    again = f"pretrained={tmp_path}/run pretrained_epoch=1 pretrained_part=whole and a run_name"
    with pytest.raises(UserError, match=re.escape(again)):
        open_run(make_config(**keys, load_epoch=1), 90)


def test_resuming_on_fewer_classes_names_both_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    config = make_config(weights_dir=str(tmp_path), run_name="run", n_epochs=3, resume_train=True)
    checkpoint.save(
        folder,
        {"weights/a": torch.zeros(3)},
        State.now(1, 90, 90, 0.1, [{"epoch": 1, "error_top1": 0.5}], 1, config, ""),
    )
    mean = np.zeros((2, 2, 3), np.float32)
    write_description(folder, Description(("cat", "dog", "emu"), mean, "crop", "apply"))
    with pytest.raises(UserError, match=r"has 2 classes, .*run had 3\. Give data with as many classes, or"):
        open_run(config, 90, "", ("cat", "dog"))


def test_an_older_checkpoint_without_its_dataset_is_opened(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = write_record(tmp_path, 1, 90, [0.5]).with_suffix(".json")
    content = json.loads(path.read_text())
    del content["dataset"]
    path.write_text(json.dumps(content))
    assert find_checkpoint(tmp_path, "latest")[0].state.dataset == ""


@pytest.mark.slow
def test_a_run_records_its_dataset_and_notices_another(program: Program, folder: Path) -> None:
    write_manifest(folder)
    program.data = folder
    program.run("n_epochs=1", devices="[cpu]")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0" * 64, "1" * 64))
    resumed = program.run("n_epochs=2", "resume_train=true", devices="[cpu]")
    assert f"note: {folder}: holds another dataset than the one of the checkpoint" in resumed.output()


def test_keys_of_weights_to_begin_with_are_said_to_have_no_effect_on_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    keys = {"weights_dir": str(tmp_path), "run_name": "run", "n_epochs": 3}
    state = State.now(1, 90, 90, 0.1, [{"epoch": 1, "error_top1": 0.5}], 1, make_config(**keys), "")
    checkpoint.save(tmp_path / "run", {"weights/a": torch.zeros(3)}, state)
    run = open_run(make_config(**keys, resume_train=True, pretrained="other", print_freq=7), 90)
    run.lock.close()
    first, second = run.notes
    assert first.endswith(
        "other now, was None before, without effect: the run has its weights from its checkpoint"
    )
    assert first.startswith("pretrained is ") and second == "print_freq is 7 now, was 20 before"


def test_another_order_of_learning_rates_is_noted_when_a_run_resumes(tmp_path: Path) -> None:
    """Of several patterns that match, the last one counts."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    keys = {"weights_dir": str(tmp_path), "run_name": "run", "n_epochs": 3}
    begun = make_config(**keys, learning_rates={"fc*": 0.1, "*.bias": 3})
    state = State.now(1, 90, 90, 0.1, [{"epoch": 1, "error_top1": 0.5}], 1, begun, "")
    checkpoint.save(tmp_path / "run", {"weights/a": torch.zeros(3)}, state)
    for rates, n_notes in ((begun.learning_rates, 0), ({"*.bias": 3, "fc*": 0.1}, 1)):
        run = open_run(make_config(**keys, learning_rates=rates, resume_train=True), 90)
        run.lock.close()
        assert len([note for note in run.notes if note.startswith("learning_rates is ")]) == n_notes


def test_keys_of_converting_are_said_to_have_no_effect_on_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    keys = {"weights_dir": str(tmp_path), "run_name": "run", "n_epochs": 3}
    state = State.now(1, 90, 90, 0.1, [{"epoch": 1, "error_top1": 0.5}], 1, make_config(**keys), "")
    checkpoint.save(tmp_path / "run", {"weights/a": torch.zeros(3)}, state)
    expected = "val_split is 0.4 now, was 0.1 before, without effect: data_folder is a converted set"
    for more, has_effect in (({}, False), ({"data_folder": str(tmp_path / "other")}, True)):
        run = open_run(make_config(**keys, **more, resume_train=True, val_split=0.4), 90)
        run.lock.close()
        note = next(note for note in run.notes if note.startswith("val_split"))
        assert note.startswith(expected) != has_effect


def test_a_checkpoint_in_a_folder_whose_name_is_not_utf_8_is_read(tmp_path: Path) -> None:
    """The safetensors package takes no such path, and a run in one could not be resumed."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "checkpoints").mkdir(parents=True)
    filters = torch.rand(4, 3, 2, 2)
    state = State.now(1, 90, 90, 0.1, [{"epoch": 1, "error_top1": 0.5}], 1, make_config(), "")
    path = checkpoint.save(folder, {"weights/a": filters}, state)
    assert torch.equal(checkpoint.load(path)["weights/a"], filters)
    found = read_filters(path)
    assert found and found[1].shape == (4, 2, 2, 3)
