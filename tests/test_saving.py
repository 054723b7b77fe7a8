"""Checkpoints by minutes, written behind the training, of which only some are kept."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Program, make_config, wait_until
from limits import limit
from safetensors.torch import load_file, save_file
from saved import assert_same, tensors

from lockstep.comm.group import World
from lockstep.comm.messages import Saved
from lockstep.errors import UserError
from lockstep.files import checksum
from lockstep.launch import saving
from lockstep.launch.processes import Ending
from lockstep.launch.recovery import next_try
from lockstep.launch.saving import Saver
from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.runs import checkpoint
from lockstep.runs.folder import Checkpoint, Run, State, find_checkpoint, records
from lockstep.runs.keeping import remove_older
from lockstep.runs.plan import Plan

EVERY_STEP = "save_minutes=1e-9"


def names(folder: Path) -> list[str]:
    return [record.stem for record in records(folder)]


def test_a_checkpoint_is_written_as_the_package_writes_it(tmp_path: Path) -> None:
    """Of every dtype and shape, with names that JSON escapes."""
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
        ("rule=gradients", "optimizer=adamw", "learning_rate=0.001", "ema_decay=0.9"),
        ("rule=outer", "rule_args={every: 2}"),
        ("rule=elastic", "rule_args={every: 2}"),
    ],
    ids=["gradients", "outer", "elastic"],
)
def test_from_within_an_epoch_a_run_goes_on_to_the_bits_of_the_unbroken_one(
    program: Program, words: tuple[str, ...]
) -> None:
    """A whole run that saves at every step has the same bits as one that does not, too."""
    words = ("n_epochs=2", "snapshot_freq=2", "cpu_threads=1", *words)
    unbroken = program.run(*words, name="unbroken")
    saving_all = program.run(*words, EVERY_STEP, name="run")
    assert_same(tensors(saving_all, 2), tensors(unbroken, 2))
    within = [name for name in names(saving_all.run_folder) if "_at_" in name]
    assert len(within) > 1
    for name in set(names(saving_all.run_folder)) - {within[-2]}:  # so that it is the newest one
        for ending in (".json", ".safetensors"):
            (saving_all.run_folder / "checkpoints" / f"{name}{ending}").unlink()
    resumed = program.run(*words, "resume_train=true", name="run")
    assert f"going on from {resumed.run_folder}/checkpoints/{within[-2]}.safetensors" in resumed.output()
    assert_same(tensors(resumed, 2), tensors(unbroken, 2))


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_within_its_epoch(program: Program) -> None:
    """The newest checkpoint is torn, as a disk may do it, and named."""
    words = ("n_epochs=400", "snapshot_freq=400", EVERY_STEP, "keep=3", "cpu_threads=1")
    running = program.start(*words)
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
    resumed = program.run(n_epochs, "resume_train=true", "save_minutes=null", "snapshot_freq=400")
    assert f"{found.path}: is damaged or half written" in resumed.output()
    assert f"going on from {before.path}" in resumed.output()
    unbroken = program.run(n_epochs, "snapshot_freq=400", "cpu_threads=1", name="unbroken")
    assert_same(tensors(resumed, found.state.epoch + 1), tensors(unbroken, found.state.epoch + 1))


class Heard:
    """In place of a trainer's teller."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def tell(self, message: object) -> None:
        self.messages.append(message)


def make_saver(folder: Path, **keys: object) -> tuple[Saver, Arena, Heard]:
    (folder / "checkpoints").mkdir()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    arena, heard = Arena(model, HostMemory(), ("momenta",)), Heard()
    program = SimpleNamespace(arena=arena, optimizer=SimpleNamespace(learning_rate=0.1))
    plan = Plan(make_config(**keys), folder, None)
    (world,) = World.on_one_host(1)
    return Saver(plan, world, program, HostMemory(), heard), arena, heard  # type: ignore[arg-type]


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
    """The training goes on meanwhile: weights, counts and the record of validation change."""
    gate = Gate(monkeypatch)
    saver, arena, heard = make_saver(tmp_path, save_minutes=1e-9)
    expected = {name: tensor.clone() for name, tensor in arena.state().items()}
    val_record = [{"epoch": 1, "loss": 1.0, "error_top1": 0.5, "error_top5": 0.5}]
    wait_until(saver.is_due, "the first checkpoint to be due")
    of_rule = {"outer/0.weight": torch.ones(4)}
    saver.save(2, 32, 90, val_record, of_rule)
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


def test_a_second_one_waits_for_the_first(tmp_path: Path, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    saver, _, heard = make_saver(tmp_path)
    saver.save(1, 8, 90, [], {})
    wait_until(lambda: gate.n_writes == 1, "the first write")
    second = threading.Thread(target=saver.save, args=(1, 16, 90, [], {}))
    second.start()
    second.join(0.2)
    assert second.is_alive() and gate.n_writes == 1
    gate.open.set()
    second.join()
    saver.finish()
    assert gate.n_writes == len(heard.messages) == 2
    assert names(tmp_path) == ["epoch_0001_at_8", "epoch_0001_at_16"]
    assert not saver.is_due()  # without save_minutes


def test_what_goes_wrong_in_the_thread_reaches_the_trainer(tmp_path: Path, monkeypatch) -> None:
    saver, _, heard = make_saver(tmp_path, wait_deadline=1)
    shutil.rmtree(tmp_path / "checkpoints")
    saver.save(1, 8, 90, [], {})
    failed = r"epoch_0001_at_8\.safetensors: the checkpoint can't be written: "
    with pytest.raises(UserError, match=failed):
        wait_until(saver.is_due, "an error")
    saver.save(1, 8, 90, [], {})
    with pytest.raises(UserError, match=failed):
        saver.finish()
    gate = Gate(monkeypatch)
    saver.save(1, 16, 90, [], {})
    with pytest.raises(
        UserError, match="the checkpoint of epoch 1 at image 16 is not written after 1 s: the disk is slow"
    ):
        saver.finish()
    gate.open.set()
    assert heard.messages == []


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


@pytest.mark.slow
def test_a_run_that_can_save_no_more_says_why(program: Program) -> None:
    running = program.start("n_epochs=100000", "snapshot_freq=100000", EVERY_STEP)
    running.wait_for_text("saved ")
    (running.run_folder / "checkpoints").rename(running.run_folder / "elsewhere")
    assert running.wait(20) == 2
    words = r"lockstep: trainer 0: .*/checkpoints/epoch_\d+_at_\d+\.(safetensors|json): .*can't be "
    assert re.match(words, running.last_line()) and "No such file" in running.last_line()
    running.assert_nothing_left()


def write_record(folder: Path, epoch: int, position: int, errors: list[float]) -> Path:
    record = [{"epoch": n, "error_top1": error} for n, error in enumerate(errors, 1)]
    state = State(epoch, position, 90, 0.1, record, 1, {}, {})
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


@pytest.mark.slow
def test_a_run_keeps_what_it_is_told_to(program: Program) -> None:
    running = program.run("n_epochs=4", "snapshot_freq=1", "keep=1", devices="[cpu]")
    last = json.loads((running.run_folder / "checkpoints" / "epoch_0004.json").read_text())
    errors = [entry["error_top1"] for entry in last["val_record"]]
    best = errors.index(min(errors)) + 1
    assert names(running.run_folder) == sorted({f"epoch_{best:04d}", "epoch_0004"})


def test_a_run_lost_before_its_first_checkpoint_begins_where_it_began(tmp_path: Path) -> None:
    """It goes on from a checkpoint in another folder, say; its own has none but an unfinished one."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".epoch_0003.safetensors.tmp").write_bytes(b"unfinished")
    start = Checkpoint(tmp_path / "elsewhere.safetensors", State(2, 90, 90, 0.1, [], 1, {}, {}))
    with open(tmp_path / "lock", "w") as lock:
        run = Run(tmp_path, start, ["said before"], lock)
    config = make_config(on_loss="restart")
    for began, told in ((start, f"starting again from {start.path}"), (None, "starting from scratch")):
        again = next_try(config, dataclasses.replace(run, start=began), Ending(1, lost="trainer 0"), 0)
        assert again and again[1].start is began and len(again[1].notices) == 1
        assert again[1].notices[0].startswith(f"{told}, for there is no checkpoint yet")
    assert list((tmp_path / "checkpoints").iterdir()) == []
