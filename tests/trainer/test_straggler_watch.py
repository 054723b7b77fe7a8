"""The trainer that the others wait for is named by runs of real processes, with the right cause."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from campaigns.watching import free_port
from conftest import ROOT, Program, Running, limit, make_config, make_folder
from simulated import Simulation
from training_runs import make_trainer
from two_hosts import end_well, start_one
from uneven import SLOW

from lockstep.comm.group import World
from lockstep.comm.messages import EpochTimes, Progress, Straggler
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.doctor.__main__ import main as run_doctor
from lockstep.launch.console import Console
from lockstep.launch.ranks import run_ranks
from lockstep.network.recorder import HostStopwatch, Recorder
from lockstep.report.runlog import read_run
from lockstep.runs.stragglers import added
from lockstep.trace.spans import trace_of
from lockstep.trainer.straggler_watch import StragglerWatch

NETWORK = ("model=uneven:Sleeps", "learning_rate=0.001", "cpu_threads=1", "n_epochs=6")
LINE = re.compile(r"^  (trainer \d) last in \d+% of steps, others wait \d+% \((.*)\)$", re.MULTILINE)


def network_with_straggler(pause: float | None = None) -> tuple[str, ...]:
    """Return the keys of a network whose slow trainer is last also if other work holds up the others.

    Args:
        pause: Seconds for which the slow trainer sleeps in each step.
    """
    return (*NETWORK, f"model_args={{slow_seconds: {pause or limit(0.06):.2f}}}")


def run_with(program: Program, slow: str, *words: str, devices: str = "[cpu, cpu]") -> Running:
    """Run train.py with a process that is slow."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'support'}", SLOW: slow}
    return program.run(*words, environment=environment, devices=devices)


def events(running: Running, kind: str) -> list[dict[str, Any]]:
    lines = (running.run_folder / running.log).read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.slow
def test_a_network_that_is_slow_in_one_trainer_is_named_everywhere(
    program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = limit(0.06)
    running = run_with(program, "trainer 1", *network_with_straggler(pause), "trace=true")
    lines = LINE.findall(running.output())
    assert lines and set(lines) == {("trainer 1", "its compute")}
    assert len(lines) <= 6  # once an epoch, though each has three lines of progress
    assert all(len(line) <= 100 for line in running.output().splitlines() if " last in " in line)
    records = events(running, "rank_times")
    assert [(record["epoch"], record["n_steps"]) for record in records] == [(n, 6) for n in range(1, 7)]
    for record in records[1:]:  # the first has the first step, which takes long
        fast, slow = record["ranks"]
        assert slow["n_last"] >= 5 and fast["seconds"]["barrier"] > slow["waited"] > 5 * 0.03
        assert slow["excess"]["compute"] > 1.5 * pause > slow["excess"]["load-wait"]
    named = [event["straggler"] for event in events(running, "progress")]
    assert named[0] is None and named[-1]["rank"] == 1 and named[-1]["cause"] == "compute"
    times = read_run(running.run_folder).newest_times
    assert times and times.straggler and (times.straggler.rank, times.n_steps) == (1, 18)
    marks = [event for event in trace_of(running.run_folder).events if event["ph"] == "i"]
    late = [mark for mark in marks if mark["pid"] == running.pids()["trainer 1"]]
    assert len(marks) == 36 and len(late) >= 30
    assert sum(mark["args"]["others_waited_ms"] for mark in late) > 34 * 30
    monkeypatch.setattr(sys, "argv", ["doctor", "--run", str(running.run_folder)])
    assert run_doctor() == 0
    warning = " ".join(capsys.readouterr().out.split())
    assert "Trainer 1 was the last in" in warning and "its compute Its device computes longer" in warning


@pytest.mark.slow
def test_a_loader_that_is_slow_is_the_cause(program: Program) -> None:
    words = ("data=uneven:make_slow_squares", "n_classes=4", "print_freq=5", "n_epochs=2")
    running = run_with(program, "loader 2", *NETWORK[:3], *words, devices="[cpu, cpu, cpu]")
    assert set(LINE.findall(running.output())) == {("trainer 2", "its loader")}
    assert events(running, "rank_times")[-1]["straggler"]["cause"] == "load-wait"


@pytest.mark.slow
def test_an_even_run_names_nobody(
    program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run_with(program, "nobody", *NETWORK, "model_args={seconds: 0.1}", "trace=true")
    assert " last in " not in running.output()
    assert [event["straggler"] for event in events(running, "rank_times")] == [None] * 6
    assert all(event["straggler"] is None for event in events(running, "progress"))
    marks = [event for event in trace_of(running.run_folder).events if event["ph"] == "i"]
    assert len({mark["pid"] for mark in marks}) == 2  # now one, now the other
    monkeypatch.setattr(sys, "argv", ["doctor", "--run", str(running.run_folder)])
    assert run_doctor() == 0
    assert "no single trainer makes the others wait notably" in capsys.readouterr().out


def test_a_lone_trainer_waits_for_nobody(program: Program) -> None:
    running = program.run("n_epochs=1", devices="[cpu]")
    assert events(running, "rank_times") == []


@pytest.mark.slow
def test_with_unequal_shares_compute_is_compared_as_measured(program: Program) -> None:
    """Each logical rank has a forward pass: equal trainers with shares of 3 and 1 take unequal times."""
    shares = ("logical_ranks=4", "global_batch_size=16", "shares=[3, 1]", "batch_size=12")
    running = run_with(program, "nobody", *NETWORK, *shares)
    assert set(LINE.findall(running.output())) == {("trainer 0", "its compute")}


@pytest.mark.slow
@pytest.mark.timeout(600)  # PyCUDA is built the first time
def test_on_gpus_events_tell_who_is_slow(program: Program, simulation: Simulation) -> None:
    """The stopwatch reads its events on the simulated driver; torch computes on the host."""
    environment = simulation.environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests' / 'support'}"
    environment[SLOW] = "trainer 0"
    running = program.run(*network_with_straggler(), devices="[cuda:0, cuda:1]", environment=environment)
    assert set(LINE.findall(running.output())) == {("trainer 0", "its compute")}
    times = read_run(running.run_folder).newest_times
    assert times and times.straggler and times.straggler.rank == 0 and times.ranks[0].n_last >= 16


@pytest.mark.slow
def test_the_slow_trainer_of_another_host_is_named_with_its_host(program: Program) -> None:
    point, words = f"rendezvous=127.0.0.1:{free_port()}", ("n_hosts=2", *network_with_straggler())
    path = f"PYTHONPATH={ROOT / 'tests' / 'support'}"
    running = [
        start_one(
            program,
            f"host_rank={host}",
            point,
            *words,
            folder=str(host),
            host=host,
            through=("env", path, f"{SLOW}={slow}"),
        )
        for host, slow in enumerate(("nobody", "trainer 1"))
    ]
    end_well(running)
    assert "  trainer 1 of host 1 last in " in running[0].output()
    for each in running:
        last = events(each, "rank_times")[-1]
        assert last["n_hosts"] == 2 and last["straggler"]["name"] == "trainer 1 of host 1"
        assert last["straggler"]["rank"] == 3 and last["straggler"]["cause"] == "compute"


def watched(waits: list[tuple[float, float]], world: World) -> list[Straggler | None]:
    """Return the straggler after each line of progress.

    Args:
        waits: For each line, how long trainers 0 and 1 wait in each of 20 steps of which they compute one.
    """
    recorder = Recorder(torch.device("cpu"), HostStopwatch())
    coordinator: Any = SimpleNamespace(world=world)
    watch, found = StragglerWatch(coordinator, recorder), []
    for times in waits:
        for _ in range(20):
            recorder.stopwatch.end_step()
        rows = [[0.0, 1.0 - wait, wait, 0.0] * 20 for wait in times]
        coordinator.rows = lambda point, row, rows=rows: rows
        found.append(watch.gather("a line"))
    return found


def test_two_lines_in_a_row_name_a_trainer_until_the_others_hardly_wait() -> None:
    slow, hardly, even = (0.3, 0.0), (0.04, 0.0), (0.0, 0.0)
    lines = [slow, even, slow, slow, hardly, hardly, even, slow]
    named = [each and (each.name, each.cause) for each in watched(lines, World.on_one_host(2)[0])]
    name = ("trainer 1", "compute")
    assert named == [None, None, None, name, name, name, None, None]
    assert watched([hardly] * 3, World.on_one_host(2)[0]) == [None] * 3  # below the limit for a new name
    assert watched([slow] * 3, World.on_one_host(2)[1]) == [None] * 3  # trainer 1 does not report


def test_the_console_repeats_a_line_once_an_epoch_and_when_the_cause_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(tmp_path / "log.jsonl", Config(), 100, writes=True)
    slow = Straggler(1, "trainer 1", 0.92, 0.31, "load-wait")
    steps = [(1, None), (1, slow), (1, slow), (1, replace(slow, cause="compute")), (1, None), (2, slow)]
    for number, (epoch, straggler) in enumerate(steps):
        progress = Progress(epoch, 20 * number, 100, 0.1, 1.0, 0.5, 100.0, 1.0, {}, straggler=straggler)
        console.take(progress)
    assert console.close("done", "stdout")
    lines = [line for line in capsys.readouterr().out.splitlines() if " last in " in line]
    loader = "  trainer 1 last in 92% of steps, others wait 31% (its loader)"
    assert lines == [loader, loader.replace("loader", "compute"), loader]


def train_unevenly(
    rank: int, pipes: dict[int, Pipe], config: Config, place: Path, phase: str
) -> list[EpochTimes | Progress]:
    """Train with a rank 1 whose exchange, reading or update takes longer. Return trainer 0's messages."""
    trainer, launcher = make_trainer(rank, pipes, config, place, double=False)
    even_seconds = 0.04 if phase == "nothing" else 0.02  # longer, so that it outweighs noise
    targets = {
        "exchange": (trainer.exchange.transport, "work"),
        "load-wait": (trainer.feed, "next"),
        "compute": (trainer.feed, "batch"),
        "other": (trainer.exchange.replicas, "after_step"),
    }
    for name, (owner, method) in targets.items():
        function = getattr(owner, method)

        def slowly(*arguments: Any, function: Any = function, name: str = name) -> Any:
            time.sleep(0.12 if rank == 1 and name == phase else even_seconds)
            return function(*arguments)

        setattr(owner, method, slowly)
    assert not trainer.run()
    messages = []
    while launcher.poll():
        message = launcher.receive(object, "a message")
        messages += [message] if isinstance(message, EpochTimes | Progress) else []
    return messages


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("exchange", marks=pytest.mark.slow),
        pytest.param("load-wait", marks=pytest.mark.slow),
        pytest.param("compute", marks=pytest.mark.slow),
        pytest.param("other", marks=pytest.mark.slow),
        pytest.param("nothing", marks=pytest.mark.slow),
    ],
)
def test_each_cause_is_told_from_the_others(tmp_path: Path, phase: str) -> None:
    data = make_folder(tmp_path / "set", n_train=30, n_val=9)
    keys = {"n_epochs": 3, "model": "smallnet", "learning_rate": 0.01, "print_freq": 5, "batch_size": 1}
    values = {**keys, "data_folder": str(data), "para_load": False, "devices": ["cpu"] * 3}
    config, _ = settle(make_config(**values))
    (tmp_path / "checkpoints").mkdir()
    messages, *silent = run_ranks(train_unevenly, 3, config, tmp_path, phase)
    assert silent == [[], []]
    epochs = [message for message in messages if isinstance(message, EpochTimes)]
    named = [message.straggler for message in messages if isinstance(message, Progress)]
    assert len(epochs) == 3 and len(named) == 6
    found = added(epochs[1:]).straggler  # the first epoch has the first step, which takes long
    if phase == "nothing":
        assert named == [None] * 6 and found is None
        return
    assert found and (found.rank, found.cause) == (1, phase)
    assert named[0] is None and named[-1] and (named[-1].rank, named[-1].cause) == (1, phase)
