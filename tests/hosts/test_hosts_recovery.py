"""Runs over several hosts that resume after a failure on any of them, to the bits of the unbroken run."""

import ctypes
import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from campaigns.watching import free_port
from conftest import ROOT, Program, Running, wait_until
from descriptors import open_files
from limits import limit
from two_hosts import end_well, start, start_one, tensors_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
WORDS = ("n_epochs=12", "snapshot_freq=6")
EVERY_STEP = "memory_checkpoint_seconds=1e-6"
_PIDFD_GETFD = 438  # the number of the system call (Linux 5.6)
_ENDS: dict[tuple[str, ...], bytes] = {}  # of the unbroken runs


def events(running: Running, name: str) -> list[dict[str, Any]]:
    lines = (running.run_folder / running.log).read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


def lines_of(running: Running, begin: str) -> list[str]:
    return [line for line in running.output().splitlines() if line.startswith(begin)]


def unbroken_end(program: Program, *words: str) -> bytes:
    """Return the last checkpoint of a run that nothing happens to."""
    if words not in _ENDS:
        both = start(program, *WORDS, "on_failure=stop", *words, folders=("whole0", "whole1"))
        end_well(both)
        first, second = (tensors_of(each)["epoch_0012.safetensors"] for each in both)
        assert first == second
        _ENDS[words] = first
    return _ENDS[words]


def assert_same_end(running: list[Running], expected: bytes) -> None:
    end_well(running)
    for each in running:
        assert tensors_of(each)["epoch_0012.safetensors"] == expected
        each.assert_nothing_left()


def assert_recovered(running: list[Running], expected: bytes, lost: str, source: str = "memory") -> None:
    """Check that both hosts have resumed once, and have ended with the bits of the unbroken run."""
    assert_same_end(running, expected)
    for each in running:
        (line,) = lines_of(each, "recovered: ")
        assert f"{lost} (pid " in line and f"; resumed from {source}" in line, line
        (event,) = events(each, "recovered")
        assert event["lost"] == lost and event["steps_repeated"] >= 0 and event["trainers"] == 4


def lose(running: list[Running], host: int, victim: str, number: int = signal.SIGKILL) -> None:
    """Send a process of a host a signal, after the fourth epoch."""
    running[0].wait_for_text("epoch 4/12: validation")
    os.kill(running[host].pids()[victim], number)


@pytest.mark.parametrize(
    ("host", "victim", "words"),
    [
        (1, "trainer 1", (EVERY_STEP,)),
        (0, "trainer 0", ()),
        (1, "loader 0", ("loader_restarts=0",)),
        (0, "loader 1", ("loader_restarts=0",)),
    ],
)
def test_a_lost_process_is_recovered_from_on_all_hosts(
    program: Program, host: int, victim: str, words: tuple[str, ...]
) -> None:
    expected = unbroken_end(program)
    running = start(program, *WORDS, *words)
    lose(running, host, victim)
    assert_recovered(running, expected, f"host {host}: {victim}")


def test_a_killed_loader_is_started_again_without_the_other_host(program: Program) -> None:
    expected = unbroken_end(program)
    running = start(program, *WORDS)
    lose(running, 1, "loader 0")
    assert_same_end(running, expected)
    assert len(events(running[1], "loader_restarted")) == 1
    assert not any(events(each, "recovered") or events(each, "lost") for each in running)


@pytest.mark.parametrize("words", [("rule=outer", "rule_args={every: 2}"), ("optimizer=adamw",)])
def test_state_of_rule_and_optimizer_is_recovered(program: Program, words: tuple[str, ...]) -> None:
    expected = unbroken_end(program, *words)
    running = start(program, *WORDS, EVERY_STEP, *words)
    lose(running, 1, "trainer 0")
    assert_recovered(running, expected, "host 1: trainer 0")


def test_processes_that_are_lost_on_both_hosts_at_once_are_recovered_from(program: Program) -> None:
    expected = unbroken_end(program)
    running = start(program, *WORDS)
    running[0].wait_for_text("epoch 4/12: validation")
    pids = [running[0].pids()["trainer 1"], running[1].pids()["loader 0"]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert_same_end(running, expected)
    for each in running:
        assert lines_of(each, "recovered: ")


def test_a_process_that_stands_still_is_recovered_from(program: Program) -> None:
    expected = unbroken_end(program)
    running = start(program, *WORDS, f"timeout={round(limit(6))}")
    lose(running, 1, "trainer 1", signal.SIGSTOP)
    assert_recovered(running, expected, "host 1: trainer 1")


def cut_connections(pid: int, but: int) -> None:
    """Shut down all TCP connections of a process, except those to a port."""
    pidfd = os.pidfd_open(pid)
    for number, link in open_files(pid).items():
        if not link.startswith("socket:"):
            continue
        descriptor = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, number, 0)
        with socket.socket(fileno=descriptor) as copied:
            if copied.family in (socket.AF_INET, socket.AF_INET6) and copied.type == socket.SOCK_STREAM:
                with suppress(OSError):  # it listens
                    if copied.getpeername()[1] != but:
                        copied.shutdown(socket.SHUT_RDWR)
    os.close(pidfd)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes descriptors of another process")
def test_a_lost_connection_between_hosts_is_recovered_from(program: Program) -> None:
    """All processes are well."""
    expected, port = unbroken_end(program), free_port()
    running = start(program, *WORDS, EVERY_STEP, port=port)
    running[0].wait_for_text("epoch 4/12: validation")
    cut_connections(running[1].pids()["trainer 0"], port)
    assert_same_end(running, expected)
    for each in running:
        (line,) = lines_of(each, "recovered: ")
        assert "resumed from memory" in line
        (event,) = events(each, "recovered")
        assert "the connection to trainer 0 of host " in event["lost"]


def test_a_process_that_is_lost_while_others_start_is_recovered_from(program: Program) -> None:
    expected = unbroken_end(program)
    running = start(program, *WORDS)
    os.kill(running[1].pids()["trainer 1"], signal.SIGKILL)
    assert_recovered(running, expected, "host 1: trainer 1", "the beginning")


DAMAGES = """
from lockstep.runs.snapshot import Retained
is_whole = Retained.is_whole

def damaged(self):
    self._bytes()[100] ^= 1
    return is_whole(self)

Retained.is_whole = damaged
"""  # run by every Python process that finds it first


def damaging(folder: Path) -> dict[str, str]:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DAMAGES)
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_memory_checkpoint_makes_all_hosts_resume_from_the_disk(
    program: Program, tmp_path: Path, damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unbroken_end(program)
    environments = [None, None]
    environments[damaged] = damaging(tmp_path / "damaging")  # type: ignore[call-overload]
    words = (*WORDS, EVERY_STEP, "snapshot_freq=2", "n_hosts=2", f"rendezvous=127.0.0.1:{free_port()}")
    running = []
    for host, folder in enumerate("ab"):
        if environments[host]:
            monkeypatch.setenv("PYTHONPATH", environments[host]["PYTHONPATH"])
        else:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        running.append(start_one(program, *words, f"host_rank={host}", folder=folder, host=host))
    running[0].wait_for_text("epoch 5/12: validation")
    os.kill(running[1].pids()["trainer 1"], signal.SIGKILL)
    assert_recovered(running, expected, "host 1: trainer 1", "epoch_000")
    for each in running:
        assert f"the memory checkpoint of host {damaged} is damaged" in lines_of(each, "recovered: ")[0]


def test_a_run_that_is_lost_at_the_same_step_again_and_again_ends(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network dies at its third step, each time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support"))
    words = ("model=small_networks:DiesAtThirdStep", "max_restarts=2", "memory_checkpoint_seconds=null")
    running = start(program, *words, "devices=[cpu]")
    for each in running:
        assert each.wait(60) == 1, each.output()
        assert "SIGSEGV" in each.last_line() and each.last_line().startswith("lockstep: host ")
        assert len(events(each, "started")) == 3
        each.assert_nothing_left()


def test_ctrl_c_in_a_recovery_saves_the_memory_checkpoint(program: Program) -> None:
    expected = unbroken_end(program)
    running = start(program, *WORDS, "resume_train=auto")
    running[0].wait_for_text("epoch 4/12: validation")
    pids = running[1].pids()
    os.kill(pids["trainer 1"], signal.SIGKILL)
    wait_until(lambda: len(events(running[0], "started")) == 2, "new processes")
    running[0].process.send_signal(signal.SIGINT)
    for each in running:
        assert each.wait(30) == 130, each.output()
        assert each.last_line().startswith("lockstep: stopped as asked; saved "), each.output()
        each.assert_nothing_left()
    assert_same_end(start(program, *WORDS, "resume_train=auto"), expected)


def test_a_second_ctrl_c_ends_the_wait_for_the_other_host(program: Program) -> None:
    """The other launcher stands still, so it does not say how the attempt ended there."""
    running = start(program, *WORDS, "timeout=600")
    running[0].wait_for_text("epoch 4/12: validation")
    os.kill(running[1].process.pid, signal.SIGSTOP)
    os.kill(running[0].pids()["trainer 1"], signal.SIGKILL)
    time.sleep(limit(3))  # until it has ended its processes
    running[0].process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    running[0].process.send_signal(signal.SIGINT)
    assert running[0].wait(20) == 130, running[0].output()
    assert running[0].last_line() == "lockstep: host 0: stopped at once, without saving"
    running[1].process.kill()
    for each in running:
        each.process.wait()
        each.assert_nothing_left()


def test_a_loss_in_a_run_that_is_asked_to_stop_saves_the_memory_checkpoints_of_all_hosts(
    program: Program,
) -> None:
    """One host gets SIGTERM while a trainer of the other one hangs, so no step ends."""
    words = ("n_epochs=12", "snapshot_freq=12", "val_freq=12", EVERY_STEP, "resume_train=auto")
    expected = unbroken_end(program, "val_freq=12")
    running = start(program, *words, f"timeout={round(limit(6))}")
    running[0].wait_for_text("epoch 4 step 2/")
    os.kill(running[1].pids()["trainer 0"], signal.SIGSTOP)
    running[0].process.send_signal(signal.SIGTERM)
    for each in running:
        assert each.wait(60) == 1, each.output()
        assert each.last_line().startswith("lockstep: stopped as asked; saved "), each.output()
        each.assert_nothing_left()
    assert_same_end(start(program, *words), expected)


@pytest.mark.parametrize("folders", [("a", "b"), ("shared", "shared")], ids=["own folders", "one folder"])
def test_a_step_that_takes_too_long_is_left_out_of_what_hosts_save(
    program: Program, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to one launcher, with `preempt_seconds`: all hosts save their memory checkpoints."""
    words = ("model=small_networks:StopsAtSixthStep", "devices=[cpu]", "n_epochs=3", "snapshot_freq=3")
    seconds = min(limit(4), 60)  # less than `timeout`, after which the trainer counts as hanging
    preempted = (*words, EVERY_STEP, f"preempt_seconds={seconds:g}", "resume_train=auto")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support"))
    unbroken = start(program, *words, folders=("whole0", "whole1"))
    end_well(unbroken)
    monkeypatch.setenv("STAND_STILL", "1")
    running = start(program, *preempted, folders=folders)
    running[0].wait_for_text("epoch 1 step 4/")
    time.sleep(2)  # it stands still in the sixth step now
    running[0].process.send_signal(signal.SIGTERM)
    for host, each in enumerate(running):
        assert each.wait(60) == 143, each.output()
        saves = folders[0] != folders[1] or host == 0
        saved = "saved " if saves else "host 0 saved epoch_0001_at_"
        assert each.last_line().startswith(f"lockstep: stopped as asked; {saved}"), each.output()
        assert "epoch_0001_at_" in each.last_line()
        each.assert_nothing_left()
    monkeypatch.delenv("STAND_STILL")
    again = start(program, *preempted, folders=folders)
    end_well(again)
    ends = [tensors_of(each)["epoch_0003.safetensors"] for each in (*again, *unbroken)]
    assert len(set(ends)) == 1


class Hosts:
    """Two launchers that can be started again at the same rendezvous, as a supervisor would."""

    def __init__(self, program: Program, *words: str) -> None:
        self.program, self.port = program, free_port()
        self.words = (*WORDS, EVERY_STEP, "resume_train=auto", f"rejoin_seconds={round(limit(40))}", *words)
        self.running = [self.begin(host) for host in (0, 1)]

    def begin(self, host: int) -> Running:
        words = ("n_hosts=2", f"host_rank={host}", f"rendezvous=127.0.0.1:{self.port}")
        return start_one(self.program, *words, *self.words, folder="ab"[host], host=host)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("empty", [False, True])
def test_a_launcher_that_comes_back_is_waited_for(program: Program, victim: int, empty: bool) -> None:
    """With its folder, and with an empty disk as on another machine."""
    expected = unbroken_end(program)
    hosts = Hosts(program)
    hosts.running[0].wait_for_text("epoch 4/12: validation")
    hosts.running[victim].process.kill()
    lost = hosts.running[victim]
    lost.process.wait()
    lost.assert_nothing_left()
    if empty:
        lost.run_folder.rename(program.place / "away")
    stays = hosts.running[1 - victim]
    stays.wait_for_text("for it to come back")
    hosts.running[victim] = hosts.begin(victim)
    assert_same_end(hosts.running, expected)
    (line,) = lines_of(stays, "recovered: ")
    assert f"host {victim}: its launcher has exited" in line and "; resumed from epoch_000" in line
    (event,) = events(stays, "recovered")
    assert event["lost"] == f"host {victim}: its launcher"


def kill_and_begin_again(hosts: Hosts, victim: int) -> None:
    lost = hosts.running[victim]
    lost.process.kill()
    lost.process.wait()
    lost.assert_nothing_left()
    hosts.running[victim] = hosts.begin(victim)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_lost_in_a_recovery_is_waited_for(program: Program, victim: int) -> None:
    """A trainer was killed just before, so both hosts agree on how to resume, or start processes."""
    expected = unbroken_end(program)
    hosts = Hosts(program)
    hosts.running[0].wait_for_text("epoch 4/12: validation")
    os.kill(hosts.running[1].pids()["trainer 0"], signal.SIGKILL)
    stays = hosts.running[1 - victim]
    wait_until(lambda: bool(events(stays, "lost")), "the first loss")
    kill_and_begin_again(hosts, victim)
    assert_same_end(hosts.running, expected)
    assert lines_of(stays, "recovered: ")


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_lost_again_as_it_comes_back_is_waited_for(
    program: Program, victim: int, seconds: float
) -> None:
    """At different moments of its start: while it joins, agrees, or starts processes."""
    expected = unbroken_end(program)
    hosts = Hosts(program)
    hosts.running[0].wait_for_text("epoch 4/12: validation")
    kill_and_begin_again(hosts, victim)
    log = hosts.running[victim].run_folder / hosts.running[victim].log
    n_before, stays = log.read_text().count("\n"), hosts.running[1 - victim]
    stays.wait_for_text("for it to come back")
    if seconds:
        wait_until(lambda: log.read_text().count("\n") > n_before, "a start")
        time.sleep(seconds - 0.3)
    else:
        time.sleep(0.5)
    kill_and_begin_again(hosts, victim)
    assert_same_end(hosts.running, expected)


@pytest.mark.parametrize("folders", [("a", "b"), ("shared", "shared")], ids=["own folders", "one folder"])
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_launcher_is_lost_what_is_in_memory_is_saved(
    program: Program, victim: int, folders: tuple[str, str]
) -> None:
    words = ("n_epochs=12", "snapshot_freq=12", "val_freq=12", EVERY_STEP, "resume_train=auto")
    expected = unbroken_end(program, "val_freq=12")
    running = start(program, *words, folders=folders)
    running[0].wait_for_text("epoch 4 step 2/")
    running[victim].process.kill()
    stays = running[1 - victim]
    assert stays.wait(30) == 1
    assert stays.last_line().startswith(f"lockstep: host {victim}: its launcher has exited"), stays.output()
    (line,) = lines_of(stays, "saved ")
    assert Path(line.removeprefix("saved ")).name >= "epoch_0004"  # the launcher may die some steps later
    running[victim].process.wait()
    assert_same_end(start(program, *words, folders=folders), expected)


def test_a_launcher_that_does_not_come_back_ends_the_run(program: Program) -> None:
    hosts = Hosts(program, f"rejoin_seconds={round(limit(3))}")
    hosts.running[0].wait_for_text("epoch 2/12: validation")
    hosts.running[1].process.kill()
    since = time.monotonic()
    assert hosts.running[0].wait(20) == 1
    assert time.monotonic() - since < limit(15)
    line = hosts.running[0].last_line()
    assert line.startswith("lockstep: host 1: its launcher has exited; it was at: ")
    assert "it has not come back within " in line
    hosts.running[0].assert_nothing_left()


def test_ctrl_c_ends_the_wait_for_a_launcher(program: Program) -> None:
    hosts = Hosts(program)
    hosts.running[0].wait_for_text("epoch 2/12: validation")
    hosts.running[1].process.kill()
    hosts.running[0].wait_for_text("for it to come back")
    time.sleep(0.5)
    hosts.running[0].process.send_signal(signal.SIGINT)
    assert hosts.running[0].wait(10) == 130
    assert "stopped as asked, while host 1 was waited for" in hosts.running[0].last_line()
    hosts.running[0].assert_nothing_left()
