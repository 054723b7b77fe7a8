"""The launcher's record of memory checkpoints: which file they lie in, and when they are written out."""

import dataclasses
import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Program, Running, make_config
from descriptors import open_files
from limits import limit
from saved import assert_same, tensors

from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.hosts.store import HostLost
from lockstep.launch import attempts
from lockstep.launch import resize as resize_command
from lockstep.launch.attempts import Attempt, Context
from lockstep.launch.children import ExitStatus
from lockstep.launch.hosting import Rejoining, SingleHost
from lockstep.launch.recovery import Recovery
from lockstep.memory.digest import digest_of
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.runs.checkpoint_files import find_checkpoint
from lockstep.runs.folder import RunFolder
from lockstep.runs.snapshot import MemoryCheckpoint
from lockstep.runs.state import State
from lockstep.signals import Interrupts

LOST = ExitStatus(1, "trainer 1 was killed", lost="trainer 1")
PAUSED = ExitStatus(0, is_paused=True)
N_TENSOR_BYTES = 100


class Console:
    """Records the lines of a console."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.logged: list[tuple[str, dict[str, Any]]] = []

    def say(self, text: str, stream: str = "stdout") -> None:
        self.said.append(text)

    def log(self, event: str, values: dict[str, Any]) -> None:
        self.logged.append((event, values))

    def describe_saved(self) -> str:
        return "saved nothing"

    def take(self, message: object) -> None:
        pass

    def close(self, text: str, stream: str) -> None:
        pass


@dataclasses.dataclass
class Launcher:
    """A run's recovery without processes."""

    recovery: Recovery
    attempt: Attempt
    console: Console
    interrupts: Interrupts


def config_on(n_devices: int) -> Config:
    config = make_config(global_batch_size=16, preempt_seconds=5.0, devices=("cpu",) * n_devices)
    return settle(config)[0]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    (tmp_path / "checkpoints").mkdir()
    console, interrupts = Console(), Interrupts()
    dataset: Any = SimpleNamespace(train=range(100), val=range(10))
    with open(tmp_path / "lock", "w") as lock:
        attempt = Attempt(config_on(2), RunFolder(tmp_path, None, [], lock))
        context = Context(SingleHost(), interrupts, None)
        yield Launcher(Recovery(console, dataset, attempt, context), attempt, console, interrupts)  # type: ignore[arg-type]


def allocate(n_bytes: int = 1 << 16) -> HostBlock:
    return HostMemory().allocate(n_bytes, "copies")


def written(block: HostBlock, slot: int, position: int = 16, to_disk: bool = False) -> MemoryCheckpoint:
    """Write a record into a slot, and return trainer 0's message about it."""
    state = State.now(1, position, 100, 0.1, [], 2, config_on(2))
    record = json.dumps({"state": dataclasses.asdict(state), "places": {}}).encode()
    content = block.array(np.uint8, (N_TENSOR_BYTES + len(record),), slot * (block.n_bytes // 2))
    content[:N_TENSOR_BYTES], content[N_TENSOR_BYTES:] = slot, np.frombuffer(record, np.uint8)
    return MemoryCheckpoint(slot, N_TENSOR_BYTES, len(record), digest_of(content), (1, position, 0), to_disk)


def resize(launcher: Launcher, attempt: Attempt, change: int) -> Attempt:
    """Ask for more or fewer trainers, and return the attempt after the pause."""
    resize_command.ask(launcher.attempt.run.folder, (), change)
    assert launcher.recovery.is_to_pause(attempt)
    status, found = launcher.recovery.next(attempt, PAUSED, (1, 1))
    assert found and status == PAUSED
    return found


def test_after_a_refused_resize_checkpoints_lie_in_the_file_from_before(launcher: Launcher) -> None:
    """Trainer 0 uses the file from which it resumes again, and does not share it a second time."""
    recovery, first, second = launcher.recovery, allocate(), allocate(1 << 17)
    recovery.take(launcher.attempt, first)
    recovery.take(launcher.attempt, written(first, 0))
    resized = resize(launcher, launcher.attempt, 1)
    recovery.take(resized, second)
    _, found = recovery.next(resized, ExitStatus(2, "trainer 2: there is too little memory"), (0, 0))
    assert found and len(found.config.devices) == 2
    recovery.take(found, written(first, 1, 32))
    _, recovered = recovery.next(found, LOST, (1, 3))
    assert recovered and recovered.source == "memory" and recovered.run.notes == []
    assert recovered.state and recovered.state.position == 32
    assert len(resize(launcher, recovered, -1).config.devices) == 1


def test_a_damaged_memory_checkpoint_is_not_resized_from_and_the_run_resumes_from_the_disk(
    launcher: Launcher,
) -> None:
    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.recovery.take(launcher.attempt, written(block, 0))
    resize_command.ask(launcher.attempt.run.folder, (), 1)
    assert launcher.recovery.is_to_pause(launcher.attempt)
    block.array(np.uint8, (1,))[0] += 1
    _, found = launcher.recovery.next(launcher.attempt, PAUSED, (1, 1))
    assert found and found.config == launcher.attempt.config and found.source == "the beginning"
    assert any(text.startswith("note: not resized: the memory checkpoint") for text in launcher.console.said)


@pytest.mark.parametrize("status", [PAUSED, LOST], ids=["paused", "lost"])
def test_a_run_that_is_asked_to_stop_writes_out_what_is_only_in_memory(
    launcher: Launcher, status: ExitStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal came after the trainers had paused, or one was lost before it could save."""
    block, wrote = allocate(), []
    monkeypatch.setattr(Recovery, "_write_out", lambda self, attempt: wrote.append(attempt))
    launcher.recovery.take(launcher.attempt, block)
    launcher.recovery.take(launcher.attempt, written(block, 0))
    resize_command.ask(launcher.attempt.run.folder, (), 1)
    assert launcher.recovery.is_to_pause(launcher.attempt)
    launcher.interrupts.code = 143
    ended, found = launcher.recovery.next(launcher.attempt, status, (1, 1))
    assert found is None and wrote == [launcher.attempt]
    assert ended.code == (status.code or 143)
    assert any("not resized: the run was asked to stop" in text for text in launcher.console.said)


def test_a_run_that_is_stopped_after_a_loss_names_what_the_writing_host_saves_for_it(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shared folder, host 0 may still be writing when this host is done."""
    saved = ["host 0 saved epoch_0001"]
    monkeypatch.setattr(launcher.console, "describe_saved", lambda: saved[-1])
    monkeypatch.setattr(SingleHost, "await_writer", lambda self: saved.append("host 0 saved epoch_0002"))
    launcher.interrupts.code = 143
    status, _ = launcher.recovery.next(launcher.attempt, LOST, (1, 1))
    assert status.message == f"{LOST.message}\nlockstep: stopped as asked; host 0 saved epoch_0002"


@pytest.mark.parametrize(("is_faulty", "n_written"), [(False, 1), (True, 0)])
def test_a_run_that_is_lost_too_often_writes_out_what_is_only_in_memory(
    launcher: Launcher, is_faulty: bool, n_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not the sums of a device that computes wrong numbers."""
    wrote = list[Attempt]()
    monkeypatch.setattr(Recovery, "_write_out", lambda self, attempt: wrote.append(attempt))
    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.recovery.take(launcher.attempt, written(block, 0))
    config = dataclasses.replace(launcher.attempt.config, max_restarts=0)
    attempt = dataclasses.replace(launcher.attempt, config=config)
    _, found = launcher.recovery.next(attempt, dataclasses.replace(LOST, is_faulty=is_faulty), (1, 1))
    assert found is None and len(wrote) == n_written


@pytest.mark.parametrize("to_disk", [True, False])
def test_only_the_checkpoint_of_the_last_step_saves_a_run_in_time(launcher: Launcher, to_disk: bool) -> None:
    """A copy that was begun before the signal may be complete after it; it is not written to the disk."""
    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.interrupts.code, launcher.interrupts.since = 143, time.monotonic() - 4.9
    launcher.recovery.take(launcher.attempt, written(block, 0, to_disk=to_disk))
    assert launcher.recovery.is_overdue(launcher.attempt.config, launcher.interrupts) is not to_disk


def test_a_run_whose_checkpoint_is_on_the_disk_and_that_does_not_leave_is_overdue(launcher: Launcher) -> None:
    """The checkpoint of an epoch was complete after the signal, and the next step hangs."""
    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.interrupts.code, launcher.interrupts.since = 143, time.monotonic() - 4.9
    launcher.recovery.take(launcher.attempt, written(block, 0, to_disk=True))
    assert not launcher.recovery.is_overdue(launcher.attempt.config, launcher.interrupts)
    name = launcher.recovery._memory[-1].state().name
    (launcher.attempt.run.folder / "checkpoints" / f"{name}.json").touch()
    assert launcher.recovery.is_overdue(launcher.attempt.config, launcher.interrupts)


def test_a_device_that_a_resize_added_and_that_is_faulty_is_not_started_again(launcher: Launcher) -> None:
    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.recovery.take(launcher.attempt, written(block, 0))
    resized = resize(launcher, launcher.attempt, 1)
    wrong = ExitStatus(1, "trainer 0 computes wrong numbers", lost="trainer 0", is_faulty=True)
    status, found = launcher.recovery.next(resized, wrong, (0, 0))
    assert found is None and status == wrong
    assert any(text.startswith("note: not resized:") for text in launcher.console.said)


def n_memory_files() -> int:
    """Return how many memory files this process has open."""
    return sum("memfd:lockstep" in link for link in open_files(os.getpid()).values())


def test_a_launcher_that_waits_for_a_lost_one_keeps_no_memory_file(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old, new = n_memory_files(), allocate(), allocate()
    launcher.recovery.take(launcher.attempt, old)
    launcher.recovery.take(launcher.attempt, written(old, 0))
    launcher.recovery.take(launcher.attempt, new)

    def lose(*arguments: object) -> None:
        raise HostLost(1, "host 1 has not been heard of")

    monkeypatch.setattr(SingleHost, "join_ends", lose)
    monkeypatch.setattr(Recovery, "_rejoins", lambda *arguments: True)
    monkeypatch.setattr(Recovery, "_write_out", lambda *arguments: True)
    with pytest.raises(Rejoining):
        launcher.recovery.next(launcher.attempt, LOST, (1, 1))
    assert n_memory_files() == before


def test_a_run_that_resumes_from_the_disk_keeps_no_memory_file(launcher: Launcher) -> None:
    """The newest memory checkpoint is damaged, and trainer 0 has shared another file since."""
    before, old, new = n_memory_files(), allocate(), allocate()
    launcher.recovery.take(launcher.attempt, old)
    launcher.recovery.take(launcher.attempt, written(old, 0))
    launcher.recovery.take(launcher.attempt, new)
    old.array(np.uint8, (1,))[0] += 1
    _, found = launcher.recovery.next(launcher.attempt, LOST, (1, 1))
    assert found and found.source == "the beginning" and n_memory_files() == before


def test_a_folder_that_cannot_be_written_is_named_when_memory_is_written_out(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.recovery.take(launcher.attempt, written(block, 0))
    monkeypatch.setattr(attempts, "remove_unfinished", refuse)
    status, found = launcher.recovery.next(launcher.attempt, ExitStatus(143, is_overdue=True), (1, 1))
    assert found is None and "can't be written to: Read-only file system" in status.message


def test_a_failure_is_logged_and_named_and_memory_is_written_out_if_the_restart_fails(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = list[Attempt]()
    monkeypatch.setattr(Recovery, "_write_out", lambda self, attempt: not wrote.append(attempt))
    block = allocate()
    launcher.recovery.take(launcher.attempt, block)
    launcher.recovery.take(launcher.attempt, written(block, 0))
    _, again = launcher.recovery.next(launcher.attempt, LOST, (1, 1))
    assert again and launcher.console.logged[-1][0] == "lost"
    assert launcher.console.logged[-1][1]["failure"] == "trainer 1 was killed"
    status, found = launcher.recovery.next(again, ExitStatus(2, "the disk is full"), (1, 1))
    assert found is None and status.message == "the disk is full"
    assert launcher.console.said[-1] == "lockstep: trainer 1 was killed" and wrote == [again]


def signal_the_writer(running: Running, number: int, n_signals: int) -> int:
    """Send signals to the process that writes a memory checkpoint. Return how many, 0 if it was not seen."""
    n_sent = 0
    while n_sent < n_signals and running.process.poll() is None:
        with suppress(OSError):  # a process has exited since
            for pid in running.children():
                if Path(f"/proc/{pid}/comm").read_text() == "the writer\n":
                    os.kill(pid, number)
                    n_sent += 1
        time.sleep(0.002)
    return n_sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to_the_writer", "n_signals"),
    [(signal.SIGTERM, 0), (signal.SIGTERM, 1000), (signal.SIGKILL, 1)],
    ids=["once", "the writer, too", "the writer is killed"],
)
def test_a_run_that_hangs_and_is_asked_to_stop_keeps_its_memory_checkpoint(
    program: Program, to_the_writer: int, n_signals: int
) -> None:
    """A scheduler may send SIGTERM to all processes again, also to the one that writes the checkpoint.

    The kernel may kill that process for lack of memory, as it did others before.
    """
    # Without validations no epoch is the best one so far, so nothing is on the disk before.
    rare = ("snapshot_freq=12", "val_freq=12", "memory_checkpoint_seconds=1e-6")
    words = ("n_epochs=12", "cpu_threads=1", *rare)
    for number in range(5):  # on a busy machine, a writer may end before this process sees it
        name = f"broken{number}"
        running = program.start(*words, f"timeout={round(limit(4))}", name=name)
        running.wait_for_text("epoch 2 step 4/")
        os.kill(running.pids()["trainer 1"], signal.SIGSTOP)
        running.process.send_signal(signal.SIGTERM)
        if bool(signal_the_writer(running, to_the_writer, n_signals)) == bool(n_signals):
            break
    else:
        pytest.fail("no writer was seen in five runs")
    assert running.wait(60) == 1, running.output()
    assert "trainer 1 (pid " in running.output()
    assert "stopped as asked; saved " in running.last_line()
    assert find_checkpoint(running.run_folder, "latest")[0].state.epoch < 12
    running.assert_nothing_left()
    resumed = program.run(*words, "resume_train=auto", name=name)
    assert_same(tensors(resumed, 12), tensors(program.run(*words, name="unbroken"), 12))
