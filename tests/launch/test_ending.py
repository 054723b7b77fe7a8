"""Any process dies: the run ends within 10 s, not with 0, one message names it, and nothing is left."""

import atexit
import fcntl
import itertools
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Program, Running, wait_until
from limits import limit
from saved import assert_same, tensors

from lockstep.comm.messages import LoaderRestarted
from lockstep.comm.pipes import Pipe
from lockstep.errors import DeadlinePassed, PeerLost
from lockstep.launch import processes
from lockstep.launch.status import StatusBoard
from lockstep.runs.checkpoint_files import find_checkpoint
from lockstep.signals import Interrupts

FOREVER = ("n_epochs=100000", "snapshot_freq=1", "on_failure=stop")


def assert_ended(running: Running, since: float, code: int, seconds: float = 10) -> str:
    """Checks code, time (on an idle machine) and leftovers; returns the last line."""
    assert running.wait(seconds) == code, running.output()
    running.assert_nothing_left()
    assert time.monotonic() - since < limit(seconds)
    assert running.last_line().startswith("lockstep: ")
    assert running.output().count("lockstep: ") == 1
    return running.last_line()


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        *(("start", victim) for victim in ("trainer 0", "loader 1")),
        *(pytest.param("start", victim, marks=pytest.mark.slow) for victim in ("trainer 1", "loader 0")),
        ("step 2/6", "trainer 1"),
        *(
            pytest.param("step 2/6", victim, marks=pytest.mark.slow)
            for victim in ("trainer 0", "loader 0", "loader 1")
        ),
        ("saved", "trainer 0"),
        *(
            pytest.param("saved", victim, marks=pytest.mark.slow)
            for victim in ("trainer 1", "loader 0", "loader 1")
        ),
    ],
)
def test_a_killed_process_ends_the_run_and_is_named(program: Program, victim: str, moment: str) -> None:
    running = program.start(*FOREVER)
    pids = running.pids()
    if moment != "start":
        running.wait_for_text(moment)
    since = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    message = assert_ended(running, since, 1)
    assert message.startswith(f"lockstep: {victim} (pid {pids[victim]}) was killed by SIGKILL")
    assert " at: " in message
    if moment != "start":
        assert "epoch" in message or "order" in message or "leaving" in message


@pytest.mark.parametrize("moment", ["start", "step 2/6"])
def test_a_killed_launcher_takes_all_with_it(program: Program, moment: str) -> None:
    running = program.start(*FOREVER)
    running.pids()
    if moment != "start":
        running.wait_for_text(moment)
    since = time.monotonic()
    running.process.kill()
    message = assert_ended(running, since, -signal.SIGKILL)
    assert f"the launcher (pid {running.process.pid}) died" in message


def test_nobody_outlives_a_launcher_whose_terminal_is_gone(program: Program) -> None:
    """The last line is left out if it can't be written."""
    ours, theirs = pty.openpty()
    words = [
        f"data_folder={program.data}",
        "n_classes=7",
        f"weights_dir={program.place}/runs",
        "run_name=run",
    ]
    command = [sys.executable, "train.py", *words, "devices=[cpu]", *FOREVER]
    output = program.place / "nothing.txt"
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    running = Running(process, program.place / "runs" / "run", output)
    program.started.append(running)
    running.pids()
    os.close(ours)  # from now on writing to it fails (EIO)
    process.kill()
    process.wait()
    wait_until(lambda: running.leftovers() == [], "all processes of the run to be gone")


def test_a_terminal_that_is_closed_stops_the_run_in_good_order(program: Program) -> None:
    """The kernel sends SIGHUP to all of its processes, and writing to it fails."""
    ours, theirs = pty.openpty()
    keys = {"data_folder": program.data, "n_classes": 7, "weights_dir": program.place, "run_name": "run"}
    words = [f"{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "train.py", *words, "devices=[cpu, cpu]", "n_epochs=100000", "print_freq=2"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
    )
    os.close(theirs)
    running = Running(process, program.place / "run", program.place / "nothing.txt")
    program.started.append(running)
    text = b""
    while b": loss " not in text:  # the first line of progress
        assert process.poll() is None, text.decode()
        text += os.read(ours, 65536)
    os.close(ours)
    assert running.wait(20) == 143
    running.assert_nothing_left()
    assert find_checkpoint(running.run_folder, "latest")[0].state.position > 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 1", "loader 0"])
def test_a_process_that_stands_still_is_found(program: Program, victim: str) -> None:
    deadline = round(limit(3))
    running = program.start(*FOREVER, f"timeout={deadline}")
    running.wait_for_text("step 2/6")
    pid = running.pids()[victim]
    since = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    message = assert_ended(running, since, 1, seconds=20)
    assert message.startswith(f"lockstep: {victim} (pid {pid}) has stood still for ")
    assert f"waited {deadline} s for {victim}" in message


def stand_still(control: object, board: StatusBoard, n_lines: int, stops: bool) -> None:
    """A child's work that does not come to its end, and says nothing after some lines."""
    for number in range(n_lines):
        board.say(f"working {number}")
        time.sleep(0.5)
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def test_a_report_that_comes_after_the_last_reading_clears_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader whose trainer was killed reports that and exits; the pipe was read before."""
    with processes.Processes(1, Interrupts()) as children:
        loader, trainer = SimpleNamespace(rank=0), SimpleNamespace(rank=0)
        with monkeypatch.context() as patch:
            patch.setattr(children, "_children", [loader, trainer])
            patch.setattr(children, "_innocence", lambda child: child.rank)
            patch.setattr(children, "listen", lambda *_: setattr(loader, "rank", 2))
            assert children._suspect(print) is trainer  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("stopped", "blamed"), [(None, "trainer 0"), ("loader 0", "loader 0")])
@pytest.mark.slow
def test_a_loader_that_waits_for_its_trainer_is_not_blamed(stopped: str | None, blamed: str) -> None:
    """Both stand still for longer than `timeout`: the loader has nothing to do before its trainer asks."""
    with processes.Processes(1, Interrupts()) as children:
        for name, n_lines in (("loader 0", 1), ("trainer 0", 8)):
            children.start(name, "test_ending:stand_still", (n_lines, name == stopped))
        status = children.watch(lambda message: None)
    assert status.lost == blamed and " has stood still for " in status.message


@pytest.mark.slow
def test_a_lone_trainer_that_stands_still_is_found_by_the_launcher(program: Program) -> None:
    running = program.start(*FOREVER, f"timeout={limit(4)}", "para_load=false", devices="[cpu]")
    running.wait_for_text("step 2/12")
    since = time.monotonic()
    os.kill(running.pids()["trainer 0"], signal.SIGSTOP)
    assert "trainer 0" in assert_ended(running, since, 1, seconds=20)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")])
def test_other_deaths_are_told_by_their_signal(program: Program, number: int, name: str) -> None:
    running = program.start(*FOREVER)
    running.wait_for_text("step 2/6")
    since = time.monotonic()
    os.kill(running.pids()["trainer 1"], number)
    assert f"was killed by {name}" in assert_ended(running, since, 1)


@pytest.mark.parametrize(
    "whom", ["the group", *(pytest.param(name, marks=pytest.mark.slow) for name in ("trainer 1", "loader 0"))]
)
def test_sigterm_to_anyone_stops_all_in_good_order(program: Program, whom: str) -> None:
    """`timeout` and cluster managers signal every process of a group."""
    running = program.start(*FOREVER)
    running.wait_for_text("step 2/6")
    since = time.monotonic()
    if whom == "the group":
        os.killpg(running.process.pid, signal.SIGTERM)
    else:
        os.kill(running.pids()[whom], signal.SIGTERM)
    assert "stopped as asked; saved" in assert_ended(running, since, 143, seconds=20)


@pytest.mark.slow
def test_a_suspended_run_goes_on(program: Program) -> None:
    """Ctrl-Z for longer than every deadline, then fg."""
    deadline = limit(2)
    running = program.start("n_epochs=30", f"timeout={deadline}", "snapshot_freq=30")
    running.wait_for_text("step 2/6")
    os.killpg(running.process.pid, signal.SIGSTOP)
    time.sleep(deadline + 5)
    os.killpg(running.process.pid, signal.SIGCONT)
    assert running.wait() == 0, running.output()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(program: Program) -> None:
    running = program.start(*FOREVER)
    running.wait_for_text("step 2/6")
    since = time.monotonic()
    os.kill(running.pids()["trainer 1"], signal.SIGSTOP)  # so that the first can't be obeyed
    running.process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    running.process.send_signal(signal.SIGINT)
    assert "stopped at once, without saving" in assert_ended(running, since, 130)


def test_ctrl_c_while_the_processes_start_ends_them_at_once(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    running = program.start(*FOREVER, "model=small_networks:TakesLongToBuild")
    running.pids()
    os.killpg(running.process.pid, signal.SIGINT)
    since = time.monotonic()
    assert assert_ended(running, since, 130) == "lockstep: stopped as asked; saved nothing"
    assert not re.search(r"step \d+/|stopping after this step", running.output())


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_of_a_resumed_run_names_its_checkpoint(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a line of the log that was torn swallows none that comes after it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    monkeypatch.setenv("SECONDS_TO_BUILD", "0")
    model = "model=small_networks:TakesLongToBuild"
    first = program.run("n_epochs=1", "snapshot_freq=1", model, devices="[cpu]")
    monkeypatch.delenv("SECONDS_TO_BUILD")
    log = first.run_folder / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    n_lines = len(log.read_bytes().splitlines())
    running = program.start("resume_train=true", *FOREVER, model, devices="[cpu]")
    running.wait_for_text("starting: ")
    os.killpg(running.process.pid, signal.SIGINT)
    since = time.monotonic()
    saved = first.run_folder / "checkpoints" / "epoch_0001.safetensors"
    received = f"lockstep: stopped as asked; saved nothing new; {saved} is unchanged"
    assert assert_ended(running, since, 130) == received
    added = log.read_text().splitlines()[n_lines:]
    assert json.loads(added[0])["event"] == "resumed"


@pytest.mark.slow
def test_a_limit_of_file_sizes_is_named(program: Program) -> None:
    """Shared memory is a file, too."""
    running = program.start(devices="[cpu]", through=("sh", "-c", 'ulimit -f 200; exec "$@"', "sh"))
    assert running.wait(20) == 2
    assert "may be made for shared host memory" in running.last_line()
    assert "Raise it (ulimit -f)" in running.last_line() and "Traceback" not in running.output()


def test_a_thread_that_can_not_be_started_is_named_in_one_line(program: Program) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    running = program.start("model=small_networks:LeavesNoThreads", "cpu_threads=2", environment=environment)
    assert running.wait(20) == 2
    end = "can't start new thread: the limit of processes is reached (see ulimit -u)"
    assert running.last_line().endswith(end) and "Traceback" not in running.output(), running.output()


@pytest.mark.slow
def test_whatever_is_killed_while_saving_the_run_can_go_on(program: Program) -> None:
    for delay in (0.0, 0.003, 0.01):
        resuming = ["resume_train=true"] if delay else []
        running = program.start(*FOREVER, *resuming, devices="[cpu]")
        running.wait_for_text("saved")
        time.sleep(delay)
        os.kill(running.pids()["trainer 0"], signal.SIGKILL)
        assert running.wait(12) == 1
    n_epochs = find_checkpoint(running.run_folder, "latest")[0].state.epoch + 1
    resumed = program.run(f"n_epochs={n_epochs}", "resume_train=true", devices="[cpu]")
    assert "resuming from" in resumed.output() and resumed.last_line().startswith("done")
    left = [path.name for path in (running.run_folder / "checkpoints").iterdir() if path.name[0] == "."]
    assert left == []


def fail_and_linger(control: object, board: object) -> None:
    """A child's work that fails, with a library that would wait for ever at its end, as CUDA may."""
    atexit.register(time.sleep, 100)
    raise ValueError("broken")


def shared_things(running: Running) -> set[str]:
    """Memory, pipes and sockets that a run's processes have open, by numbers that only they have."""
    found = set()
    for pid in running.leftovers():
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it is closed just now
                link = os.readlink(path)
                if link.startswith(("/memfd:", "pipe:", "socket:")):
                    found.add(f"{link} {path.stat().st_ino}")
    return found


@pytest.mark.slow
def test_two_runs_of_one_configuration_at_once_share_nothing(program: Program) -> None:
    """The death of one is nothing to the others, which end with the same bits."""
    names = ("one", "two", "killed")
    running = [program.start("n_epochs=20", "snapshot_freq=20", "cpu_threads=1", name=name) for name in names]
    for each in running:
        each.wait_for_text("epoch 1 step 2/6")
    inherited = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    one, two, killed = (
        {thing for thing in shared_things(each) if thing.split()[0] not in inherited} for each in running
    )
    assert len(one) > 4 and len(two) > 4
    assert not one & two and not (one | two) & killed
    running[2].process.kill()
    for each in running[:2]:
        assert each.wait() == 0, each.output()
        each.assert_nothing_left()
    assert_same(tensors(running[0], 20), tensors(running[1], 20))
    running[2].assert_nothing_left()


def test_a_process_that_fails_leaves_as_soon_as_it_has_said_so() -> None:
    with processes.Processes(60, Interrupts()) as children:
        children.start("trainer 0", "test_ending:fail_and_linger", ())
        begin = time.monotonic()
        exit_status = children.watch(lambda message: None)
        assert exit_status.code == 1 and "ValueError: broken" in exit_status.message
        while children.exit_codes()["trainer 0"] is None:
            assert time.monotonic() - begin < limit(40)
            time.sleep(0.02)
    assert children.exit_codes()["trainer 0"] == 1  # not killed


def linger(control: object, board: object) -> None:
    """A child's work, done at once; but a library of its own does not come to an end."""
    atexit.register(time.sleep, 100)


def test_a_process_that_is_done_and_does_not_leave_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEAVE_SECONDS", 1.0)
    with processes.Processes(60, Interrupts()) as children:
        children.start("trainer 0", "test_ending:linger", ())
        begin = time.monotonic()
        assert children.watch(lambda message: None) == processes.ExitStatus(0)
    assert time.monotonic() - begin < limit(50)


def dawdle(control: object, board: StatusBoard) -> None:
    """A child's work, in which it stands still for longer than it may."""
    board.say("thinking")
    time.sleep(6)
    board.say("done")


@pytest.mark.slow
def test_a_process_that_moves_again_just_before_it_is_ended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    explain, found = processes.Processes._explain_failure, []

    def look(*arguments: Any) -> processes.ExitStatus | None:
        found.append(explain(*arguments))
        return found[-1]

    monkeypatch.setattr(processes.Processes, "_explain_failure", look)
    monkeypatch.setattr(processes, "GATHER_SECONDS", limit(60))
    with processes.Processes(0.5, Interrupts()) as children:
        children.start("trainer 0", "test_ending:dawdle", ())
        assert children.watch(lambda message: None) == processes.ExitStatus(0)
    assert found == [None]  # it was taken for one that hangs, once


def stop_oneself(control: object, board: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def come_too_late(control: object, board: object) -> None:
    """A loader's work: an image takes longer than its trainer waits, so the trainer has left."""
    time.sleep(2)
    raise PeerLost("trainer 0", "trainer 0 has left its pipe")


def give_the_loader_up(control: object, board: object) -> None:
    raise DeadlinePassed("loader 0", "waited 1 s for loader 0 (a test)")


@pytest.mark.slow
def test_a_loader_that_comes_too_late_does_not_accuse_its_trainer() -> None:
    with processes.Processes(60, Interrupts()) as children:
        children.start("loader 0", "test_ending:come_too_late", ())
        children.start("trainer 0", "test_ending:give_the_loader_up", ())
        status = children.watch(lambda message: None)
    assert status.lost == "loader 0" and "waited 1 s for loader 0" in status.message


def miss_the_other(control: object, board: object) -> None:
    """A child's work: it waits for trainer 1, which never answers."""
    raise DeadlinePassed("trainer 1", "waited 1 s for trainer 1 (a test)")


@pytest.mark.timeout(limit(60))
def test_a_stopped_process_is_the_cause_without_waiting_for_more_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "LATE_SECONDS", math.inf)
    with processes.Processes(60, Interrupts()) as children:
        children.start("trainer 1", "test_ending:stop_oneself", ())
        pid = children.pids()["trainer 1"]
        stat = Path(f"/proc/{pid}/stat")
        wait_until(lambda: ") T " in stat.read_text(), "trainer 1 to be stopped")
        children.start("trainer 0", "test_ending:miss_the_other", ())
        found = children.watch(lambda message: None)
    assert found.lost == "trainer 1" and f"trainer 1 (pid {pid}) has stood still" in found.message


def miss(control: object, board: object, peer: str) -> None:
    """A child's work: it waits for another process, which never answers."""
    raise DeadlinePassed(peer, f"waited 1 s for {peer} (a test)")


@pytest.mark.parametrize(
    ("awaited", "lost", "other_host"),
    [
        ({"trainer 0": "loader 0", "loader 0": "trainer 0"}, {"trainer 0", "loader 0"}, ""),
        ({"trainer 0": "the launcher"}, {"trainer 0"}, ""),
        ({"trainer 0": "host 1"}, {""}, "host 1"),
    ],
    ids=["each other", "the launcher", "another host"],
)
def test_processes_that_were_held_up_count_as_lost_and_the_run_resumes(
    awaited: dict[str, str], lost: set[str], other_host: str
) -> None:
    """A pause of the whole machine that is longer than `timeout` does so."""
    with processes.Processes(60, Interrupts()) as children:
        for name, peer in awaited.items():
            children.start(name, "test_ending:miss", (peer,))
        found = children.watch(lambda message: None)
    assert found.code == 1 and found.lost in lost and found.awaited == other_host


def talk(control: Pipe, board: object, path: Path) -> None:
    """A child's work: send numbers for ever, and keep the last one that was sent in a file."""
    file = os.open(path, os.O_WRONLY)
    for number in itertools.count():
        control.send(number)
        os.pwrite(file, number.to_bytes(8, "big"), 0)
        time.sleep(0.001)


def be_killed(control: object, board: object, path: Path) -> None:
    """A child's work, which ends when another has sent some numbers."""
    while int.from_bytes(path.read_bytes(), "big") < 100:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_others_have_sent_before_they_are_killed_is_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a memory checkpoint that has been replaced by a newer one would look damaged."""
    explain, heard = processes.Processes._explain_failure, list[object]()

    def explain_late(*arguments: Any) -> processes.ExitStatus | None:
        exit_status = explain(*arguments)
        time.sleep(0.3)  # as on a busy machine; the other one keeps sending
        return exit_status

    monkeypatch.setattr(processes.Processes, "_explain_failure", explain_late)
    (tmp_path / "last").touch()
    with processes.Processes(60, Interrupts()) as children:
        children.start("trainer 0", "test_ending:talk", (tmp_path / "last",))
        children.start("trainer 1", "test_ending:be_killed", (tmp_path / "last",))
        exit_status = children.watch(heard.append)
        assert exit_status.lost == "trainer 1" and heard == list(range(len(heard)))
        assert len(heard) > int.from_bytes((tmp_path / "last").read_bytes(), "big") > 100


def wait_or_finish(control: object, board: object, waits: bool) -> None:
    """A child's work, which does not come to its end the first time."""
    if waits:
        time.sleep(600)


def test_another_that_is_killed_while_one_is_started_again_is_started_again_too() -> None:
    """The second is killed when the launcher has looked at it already."""
    with processes.Processes(60, Interrupts()) as children:
        for name in ("loader 0", "loader 1"):
            children.start(name, "test_ending:wait_or_finish", (True,), spares=[(False,)])
        pids, received = children.pids(), list[LoaderRestarted]()

        def kill(name: str) -> None:
            pid = pids[name]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        def on_message(message: LoaderRestarted) -> None:
            received.append(message)
            if len(received) == 1:
                kill("loader 0")

        kill("loader 1")
        assert children.watch(on_message) == processes.ExitStatus(0)
    assert [message.name for message in received] == ["loader 1", "loader 0"]
    assert all("was killed by SIGKILL" in message.failure for message in received)
    assert all(message.restarts_left == 0 for message in received)
