"""`lockstep resize`: other devices for a run while it trains."""

import dataclasses
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, Program, Running, make_config, wait_until
from limits import limit
from saved import assert_same, tensors

from lockstep.backends import devices
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.errors import UserError
from lockstep.launch import commandline
from lockstep.launch import resize as resize_command
from lockstep.launch.console import Console
from lockstep.launch.resize import ANSWER, REQUEST, Request, ResizeAnswer, resize
from lockstep.launch.resize_handler import ResizeHandler, resized
from lockstep.runs.network_source import RunSources

FOUR = {"global_batch_size": 16, "logical_ranks": 4}
WORDS = ("global_batch_size=16", "logical_ranks=4", "cpu_threads=1", "snapshot_freq=100")


def config_on(n_devices: int, **keys: object) -> Config:
    return settle(make_config(devices=["cpu"] * n_devices, **{**FOUR, **keys}))[0]


def command(running: Running, wish: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "lockstep.launch.resize", str(running.run_folder), wish]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))


@pytest.mark.slow
def test_a_run_that_is_resized_ends_with_the_bits_of_the_unbroken_one(program: Program) -> None:
    """The run is long enough for four commands on a busy machine."""
    unbroken = program.run(*WORDS, "n_epochs=99", name="unbroken", devices="[cpu]")
    running = program.start(*WORDS, "n_epochs=99", name="resized", devices="[cpu]")
    running.wait_for_text("epoch 1 step 2/")
    for wish, n_trainers in (("devices=[cpu,cpu]", 2), ("+2", 4), ("-1", 3), ("-2", 1)):
        done = command(running, wish)
        assert done.returncode == 0, done.stderr + running.output()
        assert re.match(rf"resized: {n_trainers} trainer\(s\) on cpu.* after \d+\.\d\d s", done.stdout)
        assert len(running.pids()) == 2 * n_trainers
    assert running.wait() == 0, running.output()
    assert running.output().count("\nresized: ") == 4
    assert_same(tensors(running, 99), tensors(unbroken, 99))
    running.assert_nothing_left()
    assert not (running.run_folder / REQUEST).exists()


@pytest.mark.slow
def test_a_run_that_has_shrunk_grows_back(program: Program) -> None:
    """After the loss of a trainer a request adds one; the run ends with the bits of the unbroken one."""
    words = (*WORDS, "n_epochs=60", "on_failure=shrink")
    running = program.start(*words, name="shrunk", devices="[cpu, cpu]")
    running.wait_for_text("epoch 1 step 2/")
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    running.wait_for_text(" with 1 trainer(s) in ")
    done = command(running, "+1")
    assert done.returncode == 0 and done.stdout.startswith("resized: 2 trainer(s) on cpu, cpu"), done.stderr
    assert running.wait() == 0, running.output()
    unbroken = program.run(*WORDS, "n_epochs=60", name="unbroken", devices="[cpu]")
    assert_same(tensors(running, 60), tensors(unbroken, 60))
    running.assert_nothing_left()


@pytest.mark.slow
def test_what_cannot_be_carried_out_is_refused_and_the_run_trains_on(program: Program) -> None:
    running = program.start(*WORDS, "n_epochs=100000", devices="[cpu, cpu]")
    running.wait_for_text("epoch 1 step 2/")
    pids = running.pids()
    for wish, reason in (
        ("devices=[cpu,cpu,cpu,cpu,cpu]", "5 trainers can't share 4"),
        ("-2", "2 trainer(s) and -2 leave none"),
        ("devices=[cpu,cpu]", "the run is on cpu, cpu already"),
        ("devices=[cuda:7]", "can't be used"),
    ):
        done = command(running, wish)
        assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done.stderr
    (running.run_folder / REQUEST).write_text("no JSON")
    running.wait_for_text(f"note: {running.run_folder / REQUEST}: can't be read")
    wait_until(lambda: not (running.run_folder / REQUEST).exists(), "the removal of a malformed request")
    os.kill(running.process.pid, signal.SIGUSR1)
    running.wait_for_text("note: status: loader 0: ")
    assert running.pids() == pids and running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143


def test_a_run_that_has_ended_is_not_resized(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run's folder"):
        resize(tmp_path, "+1")
    (tmp_path / "config.yaml").touch()
    (tmp_path / ".lock").touch()
    with pytest.raises(UserError, match="no launcher on this machine is training this run now"):
        resize(tmp_path, "+1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml"]


@pytest.mark.parametrize("wish", ["+0", "1", "devices=[]", "devices=cpu,,", "batch_size=3"])
def test_a_wish_that_is_none_is_refused(tmp_path: Path, wish: str) -> None:
    with pytest.raises(UserError):
        resize(tmp_path, wish)


def test_two_requests_at_once_are_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = resize_command.ask(tmp_path, ("cpu",), 0)
        with pytest.raises(UserError, match="another request waits for its answer"):
            resize(tmp_path, "+1")
    assert resize_command.read_request(tmp_path) == first
    resize_command.answer(tmp_path, ResizeAnswer(first.number, "done", "resized"))
    assert resize_command.read_request(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", ANSWER]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The temporary file can't be removed there either, as on a read-only disk."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="the request can't be written: Not a directory"):
        resize_command.ask(tmp_path / "file", (), 1)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"number": 3, "devices": [], "change": 0}',
        '{"number": "a", "devices": "cpu", "change": 0}',
        '{"number": "a", "devices": [1], "change": 0}',
        '{"number": "a", "devices": [], "change": true}',
        '{"number": "a", "devices": [], "change": 1, "more": 1}',
        '{"number": "a", "devices": [], "change": 1000000000000}',
        "[" * 100_000,
        json.dumps({"number": "a", "devices": ["cpu"] * 2000, "change": 0}),
    ],
)
def test_a_malformed_request_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / REQUEST).write_text(content)
    with pytest.raises(UserError, match=REQUEST):
        resize_command.read_request(tmp_path)


def test_a_named_pipe_in_the_place_of_a_request_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / REQUEST)
    with pytest.raises(UserError, match=REQUEST):
        resize_command.read_request(tmp_path)
    resize_command.discard(tmp_path)
    assert not (tmp_path / REQUEST).exists()


def test_devices_are_added_and_removed_at_the_end() -> None:
    two = config_on(2)
    assert resized(two, Request("a", (), 2), True).devices == ("cpu",) * 4
    assert resized(two, Request("a", (), -1), True).devices == ("cpu",)
    other = resized(two, Request("a", ("cpu",)), True)
    assert other == dataclasses.replace(two, devices=("cpu",), batch_size=16)


def test_listed_shares_become_equal_for_another_number_of_trainers(tmp_path: Path) -> None:
    assert resized(config_on(2, shares="auto"), Request("a", (), 1), True).shares == "auto"
    resizing_of_run = resizing_of(tmp_path)
    resize_command.ask(tmp_path, (), 1)
    assert resizing_of_run.is_asked(config_on(2, shares=[3, 1]), True)
    assert resizing_of_run.config and resizing_of_run.config.shares == "equal"
    resizing_of_run.finish(3)
    answer = resize_command.read_answer(tmp_path)
    assert answer and answer.text.endswith("; shares are equal now: the list was for 2")


def test_only_a_run_that_stays_the_same_training_is_resized() -> None:
    wish = Request("a", ("cpu",))
    with pytest.raises(UserError, match="only a run with global_batch_size"):
        resized(make_config(devices=["cpu", "cpu"]), wish, True)
    with pytest.raises(UserError, match="memory_checkpoint_seconds is null"):
        resized(config_on(2), wish, False)
    hosts = {"n_hosts": 2, "host_rank": 0, "rendezvous": "127.0.0.1:29500", "run_name": "a"}
    with pytest.raises(UserError, match="a run on several hosts can't be resized"):
        resized(config_on(1, **hosts), wish, True)


@contextmanager
def command_that_waits(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start the command for a run whose launcher is this process. Yield it when it has asked."""
    (folder / "config.yaml").touch()
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        arguments = [sys.executable, "-m", "lockstep.launch.resize", str(folder), "+1"]
        asking = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        wait_until((folder / REQUEST).exists, "the request")
        yield asking


def said_at_the_end(asking: "subprocess.Popen[str]") -> str:
    _, said = asking.communicate(timeout=limit(20))
    assert said.count("\n") == 1, said
    return said


def resizing_of(folder: Path) -> ResizeHandler:
    return resizing_with(folder, Console(folder / "log.jsonl", make_config(), 1, True))


def resizing_with(folder: Path, console: Console) -> ResizeHandler:
    return ResizeHandler(folder, console, RunSources(make_config()))


def test_ctrl_c_withdraws_the_request(tmp_path: Path) -> None:
    with command_that_waits(tmp_path) as asking:
        asking.send_signal(signal.SIGINT)
        assert "the request is withdrawn" in said_at_the_end(asking) and asking.returncode == 130
    assert not (tmp_path / REQUEST).exists()


def test_ctrl_c_comes_too_late_for_a_request_that_is_accepted(tmp_path: Path) -> None:
    resizing_of_run = resizing_of(tmp_path)
    with command_that_waits(tmp_path) as asking:
        assert resizing_of_run.is_asked(config_on(1), True)
        asking.send_signal(signal.SIGINT)
        assert "the request is accepted already" in said_at_the_end(asking) and asking.returncode == 130
    assert (tmp_path / REQUEST).exists()
    resizing_of_run.finish(3)
    assert not (tmp_path / REQUEST).exists()


def test_a_request_that_is_withdrawn_while_it_is_checked_is_not_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resizing_of_run, request = resizing_of(tmp_path), resize_command.ask(tmp_path, (), 1)
    monkeypatch.setattr(devices, "check", lambda names: resize_command.discard(tmp_path, request.number))
    assert not resizing_of_run.is_asked(config_on(1), True) and resizing_of_run.before is None


def test_an_answer_leaves_the_request_of_another_command(tmp_path: Path) -> None:
    first = resize_command.ask(tmp_path, (), 1)
    resize_command.discard(tmp_path, first.number)
    second = resize_command.ask(tmp_path, (), 2)
    resize_command.answer(tmp_path, ResizeAnswer(first.number, "done", "resized"))
    resize_command.discard(tmp_path, first.number)
    assert resize_command.read_request(tmp_path) == second


def test_the_command_says_when_the_run_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped launcher does not answer."""
    monkeypatch.setattr(resize_command, "_HINT_SECONDS", 0.0)
    said = list[str]()

    def is_running(folder: Path) -> bool:
        said.append(capsys.readouterr().err)
        return len(said) < 4

    monkeypatch.setattr(resize_command, "is_running", is_running)
    with pytest.raises(UserError, match="has ended before it could be resized"):
        resize_command._await_answer(tmp_path, resize_command.ask(tmp_path, (), 1))
    text = "the run has not answered for 0 s; it may be stopped. Ctrl-C withdraws the request."
    assert "".join(said) == f"note: {tmp_path}: {text}\n"  # once


FULL_DISK = """
import os, shutil
usage = shutil.disk_usage

def disk_usage(path):
    found = usage(path)
    return found._replace(free=0) if os.path.exists(os.environ["FULL_DISK"]) else found

shutil.disk_usage = disk_usage
"""  # run by every Python process that finds it first


@pytest.mark.slow
def test_a_disk_that_is_full_by_now_ends_neither_a_recovery_nor_a_resize(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FULL_DISK)
    places = {"PYTHONPATH": str(tmp_path / "site"), "FULL_DISK": str(tmp_path / "full")}
    running = program.start(
        *WORDS, "n_epochs=100000", "memory_checkpoint_seconds=1e-6", environment={**os.environ, **places}
    )
    running.wait_for_text("step 2/")
    (tmp_path / "full").touch()
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    running.wait_for_text("recovered: ")
    assert command(running, "+1").returncode == 0
    (tmp_path / "full").unlink()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143, running.output()


def test_the_command_ends_when_its_request_is_gone(tmp_path: Path) -> None:
    with command_that_waits(tmp_path) as asking:
        (tmp_path / REQUEST).unlink()
        assert "has gone without an answer" in said_at_the_end(asking) and asking.returncode == 2


def test_a_request_that_cant_be_answered_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resizing_of_run = resizing_of(tmp_path)

    def fail(path: Path, text: str) -> None:
        raise UserError(f"{path}: can't be written: No space left on device")

    monkeypatch.setattr(resize_command, "write_text", fail)
    resize_command.ask(tmp_path, (), 1)
    assert not resizing_of_run.is_asked(config_on(1), True)
    assert not (tmp_path / REQUEST).exists()


def test_a_request_from_before_the_start_is_refused(tmp_path: Path) -> None:
    request = resize_command.ask(tmp_path, (), 1)
    console = Console(tmp_path / "log.jsonl", make_config(), 1, True)
    waiting = resizing_with(tmp_path, console)
    answer = resize_command.read_answer(tmp_path)
    assert answer and (answer.number, answer.state) == (request.number, "refused")
    assert not waiting.is_asked(config_on(1), True)
    resize_command.ask(tmp_path, (), 1)
    assert waiting.is_asked(config_on(1), True)  # a new one is carried out


def test_replicas_that_can_not_go_on_are_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    two = settle(make_config(devices=["cpu"] * 2, rule="elastic", global_batch_size=16))[0]
    console = Console(tmp_path / "log.jsonl", two, 1, True)
    waiting = resizing_with(tmp_path, console)
    resize_command.ask(tmp_path, (), 1)
    assert waiting.is_asked(two, True)
    waiting.finish(7)
    assert console.close("", "stdout")  # its thread prints
    assert "note: the checkpoint has 2 replicas of rule: elastic: all begin with" in capsys.readouterr().out


def test_the_threads_of_logical_ranks_depend_on_the_cores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads change bits, which any number of trainers must not, nor a resize."""
    monkeypatch.setattr(devices, "count_cores", lambda: 12)

    def complete(n_trainers: int, **keys: object) -> tuple[Config, list[str]]:
        words = [f"devices=[{', '.join(['cpu'] * n_trainers)}]", *(f"{k}={v}" for k, v in keys.items())]
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        config, notes = commandline.complete_config(commandline.parse_arguments("", ROOT / "config.yaml"))
        return config, [note for note in notes if note.startswith("cpu_threads")]

    for n_trainers, n_used in ((1, 3), (3, 9), (4, 12)):
        config, notes = complete(n_trainers, **FOUR)
        assert config.cpu_threads == 3
        assert [f"now {n_used} of 12 cores are used" in note for note in notes] == [True] * (n_used < 12)
    assert resized(complete(1, **FOUR)[0], Request("a", (), 1), True).cpu_threads == 3
    assert complete(1, global_batch_size=60, logical_ranks=30)[0].cpu_threads == 1
    assert complete(1, **FOUR, cpu_threads=12)[1] == []
    assert complete(1)[0].cpu_threads is None
