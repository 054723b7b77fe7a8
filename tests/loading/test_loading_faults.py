"""Disks and files that fail while a run reads them, and loaders that die."""

import errno
import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import Program, Running, make_config, wait_until
from saved import assert_same, tensors

from lockstep.backends import devices
from lockstep.data import hkl
from lockstep.errors import UserError
from lockstep.launch.checks import check_descriptors

# Run by every Python process that finds it first: the faults of a disk, in the one call that reads images.
FAULTY = """
import errno, os, time
_read, _received = os.preadv, {received!r}

def preadv(descriptor, buffers, offset):
    path = os.readlink(f"/proc/self/fd/{{descriptor}}")
    if path.endswith({name!r}):
        with open(_received, "a") as file:
            file.write(f"{{os.getpid()}}\\n")
        with open(_received) as file:
            n_faults = len(file.readlines())
        {fault}
    return _read(descriptor, buffers, offset)

os.preadv = preadv
"""
EIO = "if n_faults <= {n}: raise OSError(errno.EIO, os.strerror(errno.EIO))"
SHORT = "if n_faults <= {n}: return 0"
SLOW = "time.sleep(0.3)"


class Disk:
    """A disk whose files called `name` can't be read well by the program's processes. n_reads: so far."""

    def __init__(self, place: Path, name: str, fault: str) -> None:
        (place / "disk").mkdir()
        self._received = place / "disk" / "received"
        text = FAULTY.format(received=str(self._received), name=name, fault=fault)
        (place / "disk" / "sitecustomize.py").write_text(text)
        self.environment = {**os.environ, "PYTHONPATH": str(place / "disk")}

    @property
    def n_reads(self) -> int:
        return len(self._received.read_text().splitlines()) if self._received.exists() else 0


@pytest.mark.slow
def test_a_read_that_fails_for_a_while_changes_nothing(program: Program, tmp_path: Path) -> None:
    words = ("n_epochs=1", "cpu_threads=1")
    disk = Disk(tmp_path, "0001.hkl", EIO.format(n=2))
    faulty = program.run(*words, name="faulty", devices="[cpu]", environment=disk.environment)
    assert disk.n_reads > 2
    assert_same(tensors(faulty, 1), tensors(program.run(*words, name="good", devices="[cpu]"), 1))


@pytest.mark.parametrize(
    ("fault", "words", "received"),
    [
        (EIO, ("read_retries=1",), "(tried 2 times): [Errno 5] Input/output error"),
        pytest.param(
            SHORT, ("read_retries=0", "para_load=false"), ": the file ends ", marks=pytest.mark.slow
        ),
    ],
    ids=["an error in a loader", "short in a trainer"],
)
def test_a_read_that_goes_on_failing_is_named(
    program: Program, tmp_path: Path, fault: str, words: tuple[str, ...], received: str
) -> None:
    disk = Disk(tmp_path, "train_hkl/0001.hkl", fault.format(n=10**9))
    running = program.run("n_epochs=3", *words, code=2, devices="[cpu]", environment=disk.environment)
    who = "trainer" if "para_load=false" in words else "loader"
    assert re.match(rf"lockstep: {who} \d: .*train_hkl/0001\.hkl: can't be read", running.last_line())
    assert received in running.last_line()
    assert disk.n_reads >= (2 if "read_retries=1" in words else 1)
    running.assert_nothing_left()


@pytest.fixture
def array(tmp_path: Path) -> hkl.HklArray:
    hkl.write(tmp_path / "a.hkl", np.arange(48, dtype=np.uint8).reshape(4, 2, 2, 3))
    return hkl.inspect(tmp_path / "a.hkl")


@pytest.mark.parametrize(
    ("n_faults", "retries", "pauses", "message"),
    [
        (2, 2, [0.1, 0.2], None),
        (6, 6, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0], None),
        (1, 0, [], r"a\.hkl: can't be read: \[Errno 5\]"),
        (3, 2, [0.1, 0.2], r"a\.hkl: can't be read \(tried 3 times\): \[Errno 5\]"),
    ],
)
def test_it_is_read_again_as_often_as_is_said(
    array: hkl.HklArray,
    monkeypatch: pytest.MonkeyPatch,
    n_faults: int,
    retries: int,
    pauses: list[float],
    message: str | None,
) -> None:
    faults, waited, read = [n_faults], list[float](), os.preadv

    def preadv(*arguments: object) -> int:
        faults[0] -= 1
        if faults[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(hkl.time, "sleep", waited.append)
    out = np.zeros(array.shape, array.dtype)
    if message is None:
        hkl.read_rows(array, 0, out, retries)
        assert out.ravel().tolist() == list(range(48))
    else:
        with pytest.raises(UserError, match=message):
            hkl.read_rows(array, 0, out, retries)
    assert waited == pauses


def vanish(path: Path) -> None:
    path.unlink()


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def be_another(path: Path) -> None:
    """Replace the file in place by one of the same size, with a time later than any clock's tick."""
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"new")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("layout", ["plain", "compressed", "c01b"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (vanish, "No such file"),
        (shrink, "it was changed after the start of the run"),
        (be_another, "it was changed after the start of the run"),
    ],
)
def test_a_file_that_is_not_what_it_was_is_named_at_once(
    array: hkl.HklArray,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    change: Callable[[Path], None],
    message: str,
) -> None:
    monkeypatch.setattr(hkl.time, "sleep", lambda seconds: pytest.fail("nothing to wait for"))
    path = Path(array.path)
    if layout == "compressed":
        with h5py.File(path, "w") as file:
            file.create_dataset("data", data=np.zeros((4, 2, 2, 3), np.uint8), compression="gzip")
        array = hkl.inspect(path)
        assert array.offset is None
    if layout == "c01b":
        hkl.write(path, np.zeros((3, 2, 2, 4), np.uint8))
        array = hkl.as_c01b(hkl.inspect(path))
    out = np.zeros((2, *array.row_shape), np.uint8)
    hkl.read_rows(array, 1, out)
    change(path)
    with pytest.raises(UserError, match=rf"a\.hkl: can't be read: .*{message}"):
        hkl.read_rows(array, 1, out, 5)


@pytest.mark.slow
def test_a_file_that_goes_away_during_the_run_is_named(folder: Path, program: Program) -> None:
    program.data = folder
    running = program.start("n_epochs=100000")
    running.wait_for_text("step 2/6")
    vanish(folder / "train_hkl" / "0002.hkl")
    assert running.wait(20) == 2
    assert "train_hkl/0002.hkl: can't be read: " in running.last_line()
    running.assert_nothing_left()


@pytest.mark.slow
def test_of_a_slow_disk_the_time_split_says_so(program: Program, tmp_path: Path) -> None:
    disk = Disk(tmp_path, ".hkl", SLOW)
    running = program.run("n_epochs=1", "model=smallnet", environment=disk.environment)
    assert disk.n_reads > 0
    events = [json.loads(line) for line in (running.run_folder / "log.jsonl").read_text().splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "progress"]
    total = {phase: sum(each[phase] for each in seconds) for phase in seconds[0]}
    # The trainer that waits longer is met by the other: both wait for the disk.
    assert total["load-wait"] + total["barrier"] > total["compute"] + total["exchange"]
    assert total["load-wait"] > total["compute"]


def events(running: Running, name: str) -> list[dict[str, Any]]:
    lines = (running.run_folder / "log.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "trainers", "restarts", "n_left"),
    [
        ("step 2/12", "[cpu]", ("loader_restarts=1",), 0),
        ("starting: ", "[cpu, cpu]", ("loader_restarts=1",), 0),
        ("step 2/6", "[cpu, cpu]", (), 2),
    ],
    ids=["in a step", "at the start", "by default"],
)
def test_a_killed_loader_is_started_again_to_the_same_bits(
    program: Program, when: str, trainers: str, restarts: tuple[str, ...], n_left: int
) -> None:
    words = ("n_epochs=12", "snapshot_freq=12", "cpu_threads=1")
    running = program.start(*words, *restarts, devices=trainers)
    running.wait_for_text(when)
    pid = running.pids()["loader 0"]
    os.kill(pid, signal.SIGKILL)
    assert running.wait() == 0, running.output()
    received = f"note: loader 0 (pid {pid}) was killed by SIGKILL"
    assert (
        received in running.output() and f"it is started again (restarts left: {n_left})" in running.output()
    )
    assert not events(running, "recovered")
    assert_same(tensors(running, 12), tensors(program.run(*words, name="unbroken", devices=trainers), 12))
    running.assert_nothing_left()


def test_by_default_a_killed_loader_is_started_again_and_no_trainer(program: Program) -> None:
    """The fourth time all are: each loader has three restarts before the run resumes as after any loss."""
    running = program.start("n_epochs=100000", devices="[cpu, cpu]")
    running.wait_for_text("step 2/6")
    pid = running.pids()["loader 0"]
    for n_left in (2, 1, 0):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=n_left: f"(restarts left: {n})" in running.output(), "another loader")
        wait_until(lambda n=n_left: len(events(running, "loader_restarted")) == 3 - n, "its line in the log")
        pid = events(running, "loader_restarted")[-1]["pid"]
    assert len(events(running, "started")) == 1 and not events(running, "recovered")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: events(running, "recovered"), "the recovery")
    assert events(running, "recovered")[0]["lost"] == "loader 0"
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143
    running.assert_nothing_left()


@pytest.mark.parametrize(
    ("keys", "n_restarts"),
    [
        ({}, 3),
        ({"devices": ["cpu"]}, 0),
        ({"devices": ["cpu"], "on_failure": "restart"}, 3),
        ({"on_failure": "stop"}, 0),
        ({"on_failure": "shrink", "global_batch_size": 8}, 0),
        ({"para_load": False}, 0),
        ({"loader_restarts": 7, "on_failure": "stop"}, 7),
        ({"devices": ["cuda:0", "cuda:1"]}, 3),
        ({"devices": ["cuda:0", "cuda:1"], "upload": "loader"}, 0),
    ],
)
def test_loaders_are_started_again_where_the_run_restarts(keys: dict[str, Any], n_restarts: int) -> None:
    assert devices.loader_restarts_of(make_config(**{"devices": ["cpu", "cpu"], **keys})) == n_restarts


@pytest.mark.slow
def test_a_loader_that_is_killed_too_often_is_a_loss(program: Program) -> None:
    running = program.start("n_epochs=100000", "loader_restarts=1", "on_failure=stop")
    running.wait_for_text("step 2/6")
    before = running.children()
    os.kill(running.pids()["loader 1"], signal.SIGKILL)
    wait_until(lambda: running.children() - before, "another loader")
    (second,) = running.children() - before
    os.kill(second, signal.SIGKILL)
    assert running.wait(20) == 1
    assert running.last_line().startswith(f"lockstep: loader 1 (pid {second}) was killed by SIGKILL")
    running.assert_nothing_left()


def test_on_gpus_loaders_that_upload_are_not_started_again() -> None:
    keys = {"loader_restarts": 1, "devices": ["cuda:0"]}
    with pytest.raises(UserError, match="loader_restarts: needs upload: trainer on GPUs: a loader that"):
        devices.check_keys(make_config(**keys, upload="loader"))
    devices.check_keys(make_config(**keys))


MANY = ("loader_restarts=100", "n_epochs=1")


@pytest.mark.slow
def test_the_limit_of_open_files_is_raised_where_restarts_need_it(program: Program) -> None:
    limited = ("sh", "-c", 'ulimit -Sn 128; exec "$@"', "sh")
    assert program.run(*MANY, devices="[cpu, cpu]", through=limited).last_line().startswith("done")


@pytest.mark.parametrize(("restarts", "advice"), [(0, "use fewer devices, or raise"), (9, "lower loader_r")])
def test_a_limit_of_open_files_is_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, restarts: int, advice: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with pytest.raises(UserError, match=rf"open files, the limit is 64: {advice}"):
        check_descriptors(make_config(devices=["cpu", "cpu"], loader_restarts=restarts))


def test_too_low_a_limit_of_open_files_is_refused_in_one_line(program: Program) -> None:
    limited = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    running = program.run(*MANY, devices="[cpu, cpu, cpu]", through=limited, code=2)
    said = (
        r"lockstep: 3 trainers with loader_restarts: 100 need up to \d+ open files, the limit is 256: lower "
    )
    assert re.match(said, running.last_line()) and "Traceback" not in running.output()
    assert not running.run_folder.exists()
