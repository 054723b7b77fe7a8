"""A process that dies or hangs on any host ends all hosts soon; they name host, process and cause."""

import os
import signal
import time

import pytest
from conftest import ROOT, Program, Running, wait_until
from limits import limit
from two_hosts import end_well, remove, start, tensors_of

FOREVER = ("n_epochs=100000", "snapshot_freq=1", "on_failure=stop")
POINTS = {"the start": None, "a step": "step 2/3", "the save": "saved"}  # what host 0 shows
TRACED = {  # what a process of host 1 says that it is at
    "the sum in the host": "waiting for the others",
    "the sum over the network": "exchanging",
    "the update": "forward, backward, update",
    "validation": "validating",
}


def assert_all_ended(running: list[Running], since: float, code: int, seconds: float) -> list[str]:
    """Checks exit codes, time (on an idle machine), leftovers; returns the last lines."""
    texts = []
    for each in running:
        assert each.wait(seconds) == code, all_said(running)
        each.assert_nothing_left()
        assert each.last_line().startswith("lockstep: "), each.output()
        assert each.output().count("lockstep: ") == 1, each.output()
        texts.append(each.last_line())
    assert time.monotonic() - since < limit(seconds)
    return texts


def all_said(running: list[Running]) -> str:
    return "\n".join(each.output() for each in running)


def reach(running: list[Running], point: str | None) -> dict[str, int]:
    """Wait until both runs reach a phase; return the pids of host 1, the launcher's included."""
    pids = {"launcher": running[1].process.pid, **running[1].pids()}
    if point in TRACED.values():
        traces = running[1].run_folder / "trace"
        wait_until(lambda: any(point in path.read_text() for path in traces.glob("*.txt")), point)
    elif point:
        running[0].wait_for_text(point)
    return pids


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("a step", "trainer 1"),
        *(
            pytest.param(point, victim, marks=pytest.mark.slow)
            for point, victim in (
                ("the start", "trainer 0"),
                ("a step", "loader 0"),
                ("the save", "trainer 0"),
                ("the sum in the host", "trainer 0"),
                ("the sum over the network", "trainer 1"),
                ("the update", "trainer 0"),
                ("validation", "loader 1"),
            )
        ),
    ],
)
def test_a_killed_process_of_another_host_is_named_by_all(program: Program, point: str, victim: str) -> None:
    running = start(program, *FOREVER, "trace=true")
    pids = reach(running, {**POINTS, **TRACED}[point])
    since = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    for line in assert_all_ended(running, since, 1, 10):
        assert line.startswith(f"lockstep: host 1: {victim} (pid {pids[victim]}) was killed by SIGKILL"), (
            all_said(running)
        )
        assert " at: " in line


@pytest.mark.slow
@pytest.mark.parametrize("point", ["the start", "a step"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_launcher_is_missed_by_the_other_host(program: Program, victim: int, point: str) -> None:
    """At the start trainers still import what they need, and are not connected to those of the other."""
    running = start(program, *FOREVER)
    reach(running, POINTS[point])
    since = time.monotonic()
    running[victim].process.kill()
    assert running[1 - victim].wait(10) == 1, running[1 - victim].output()
    line = running[1 - victim].last_line()
    assert line.startswith(f"lockstep: host {victim}: its launcher "), line
    assert " was at: " in line
    assert time.monotonic() - since < limit(10)
    for each in running:
        each.assert_nothing_left()
    if point == "a step":  # else no process there has yet listened to its pipes
        assert f"the launcher (pid {running[victim].process.pid}) died" in running[victim].last_line()


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_by_all(program: Program) -> None:
    deadline = round(limit(6))
    running = start(program, *FOREVER, f"timeout={deadline}")
    pids = reach(running, "step 2/3")
    since = time.monotonic()
    os.kill(pids["trainer 1"], signal.SIGSTOP)
    for line in assert_all_ended(running, since, 1, 30):
        assert line.startswith(f"lockstep: host 1: trainer 1 (pid {pids['trainer 1']}) has stood still"), (
            all_said(running)
        )


@pytest.mark.slow
def test_a_host_may_come_back_without_its_folder_and_with_another_number(program: Program) -> None:
    words = ("snapshot_freq=1", "resume_train=auto", "devices=[cpu]")
    unbroken = start(program, "n_epochs=3", *words, folders=("c", "d"))
    end_well(unbroken)
    end_well(start(program, "n_epochs=2", *words))
    remove(program.place / "a" / "run")
    again = start(program, "n_epochs=3", *words, folders=("b", "a"))
    end_well(again)
    assert "host 0 has the newest checkpoint, epoch_0002, and has sent it to host 1" in again[1].output()
    assert (program.place / "a" / "run" / "host1.jsonl").exists()
    for each in again:
        assert tensors_of(each)["epoch_0003.safetensors"] == tensors_of(unbroken[0])["epoch_0003.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("folders", [("a", "b"), ("a", "a")])
def test_a_complete_run_is_no_failure_for_auto_on_any_host(
    program: Program, folders: tuple[str, str]
) -> None:
    words = ("n_epochs=1", "resume_train=auto", "devices=[cpu]")
    end_well(start(program, *words, folders=folders))
    for each in start(program, *words, folders=folders):
        assert each.wait(60) == 0, each.output()
        assert "all 1 epochs are done; raise n_epochs to train longer" in each.last_line()
    for each in start(program, "n_epochs=1", "resume_train=true", "devices=[cpu]", folders=folders):
        assert each.wait(60) == 2, each.output()


@pytest.mark.slow
def test_a_launcher_that_stands_still_is_missed(program: Program) -> None:
    running = start(program, *FOREVER, f"timeout={round(limit(6))}")
    reach(running, "step 2/3")
    os.kill(running[1].process.pid, signal.SIGSTOP)
    assert running[0].wait(30) == 1
    assert running[0].last_line().startswith("lockstep: host 1: its launcher has sent no heartbeat for ")
    os.kill(running[1].process.pid, signal.SIGCONT)
    assert running[1].wait(30) == 1
    assert running[1].last_line().startswith("lockstep: host ")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_host_that_is_asked_to_stop_stops_all_in_good_order(program: Program, asked: int) -> None:
    running = start(program, *FOREVER)
    reach(running, "step 2/3")
    since = time.monotonic()
    running[asked].process.send_signal(signal.SIGTERM)
    for line in assert_all_ended(running, since, 143, 20):
        assert line.startswith("lockstep: stopped as asked; saved")
    wait_until(lambda: tensors_of(running[0]).keys() == tensors_of(running[1]).keys(), "equal checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_host_that_is_asked_to_stop_while_processes_start_stops_all_at_once(
    program: Program, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    running = start(program, *FOREVER, "model=small_networks:TakesLongToBuild")
    running[asked].pids()
    since = time.monotonic()
    running[asked].process.send_signal(signal.SIGINT)
    for line in assert_all_ended(running, since, 130, 10):
        assert line == f"lockstep: host {asked}: was stopped as asked, before training"


@pytest.mark.slow
def test_hosts_that_share_a_folder_write_it_once(program: Program) -> None:
    words = ("snapshot_freq=1", "resume_train=auto", "devices=[cpu]")
    for n_epochs in (1, 2):
        running = start(program, f"n_epochs={n_epochs}", *words, folders=("shared", "shared"))
        end_well(running)
    assert "weights_dir is shared with host 0, which writes there for all hosts" in running[1].output()
    assert {path.name for path in running[0].run_folder.iterdir()} >= {
        "log.jsonl",
        "host1.jsonl",
        "config.yaml",
    }
    assert list(tensors_of(running[0])) and "resuming from" in running[1].output()
