"""The timeline of all processes, on one clock."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import Program

from lockstep.trace.__main__ import main
from lockstep.trace.spans import trace_of


@pytest.mark.slow
def test_a_run_shows_all_its_processes_on_one_clock(program: Program) -> None:
    running = program.run("n_epochs=1", "trace=true")
    assert main([str(running.run_folder)]) == 0
    events = json.loads((running.run_folder / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {pid: f"{name} (pid {pid})" for name, pid in running.pids().items()}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    whats = {(span["cat"], span["name"]) for span in spans}
    assert {
        ("trainer", "forward, backward, update"),
        ("trainer", "waiting for a minibatch"),
        ("trainer", "waiting for the others"),
        ("trainer", "exchanging"),
        ("loader", "waiting for an order"),
        ("loader", "preparing"),
    } <= whats
    # One clock: within a step, both trainers begin to exchange when both have arrived.
    for at in {span["args"]["at"] for span in spans if span["name"] == "exchanging"}:
        of_step = [span for span in spans if span["args"]["at"] == at]
        came = max(span["ts"] for span in of_step if span["name"] == "forward, backward, update")
        first = min(span["ts"] for span in of_step if span["name"] == "exchanging")
        assert came < first
    for pid in names:
        own = sorted((span["ts"], span["ts"] + span["dur"]) for span in spans if span["pid"] == pid)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(own))


def test_without_the_key_nothing_is_written_and_the_remedy_is_named(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    running = program.run("n_epochs=1", devices="[cpu]")
    assert not (running.run_folder / "trace").exists()
    assert main([str(running.run_folder)]) == 2
    assert "has no trace: train with trace=true" in capsys.readouterr().err


def test_other_files_in_the_folder_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "loader 0.17.txt").write_text("1000 a: b\n3000 c\n")
    (tmp_path / "trace" / "notes.txt").write_text("")
    (tmp_path / "trace" / "loader 0.17 (copy).txt").write_text("mine\n")
    assert [event["pid"] for event in trace_of(tmp_path).events if event["ph"] == "X"] == [17]


def test_a_line_that_a_kill_has_cut_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "loader 0.17.txt").write_text("1000 a: b\n3000 c (d: e)\n5000 f\n60")
    spans = [
        (e["name"], e["args"]["at"], e["ts"], e["dur"]) for e in trace_of(tmp_path).events if e["ph"] == "X"
    ]
    assert spans == [("b", "a", 0.0, 2.0), ("c", "c (d: e)", 2.0, 2.0)]


def marks_of(folder: Path) -> list[tuple[int, str, float, float]]:
    """Return process, step, time in ms and wait of the others in ms of each mark."""
    found = [event for event in trace_of(folder).events if event["ph"] == "i"]
    assert {event["name"] for event in found} <= {"last"}
    return [(e["pid"], e["args"]["at"], e["ts"] / 1e3, e["args"]["others_waited_ms"]) for e in found]


def lines_of_steps(*steps: tuple[str, int, int, int]) -> str:
    """Return a trainer's lines: of each step its name, and arrival, first and second exchange in ms."""
    text = "0 starting\n"
    for name, arrival, until, again in steps:
        for time, phase in (
            (arrival, "waiting for the others (all have prepared)"),
            (until, "exchanging"),
            (again, "waiting for the others (all have worked)"),
            (again + 1, "exchanging"),
        ):
            text += f"{time * 1_000_000} epoch 1, {name}: {phase}\n"
    return text


def test_the_last_trainer_of_each_step_is_marked(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    for name, text in {
        "trainer 0.10": lines_of_steps(("step 1", 10, 50, 60), ("step 2", 190, 200, 210)),
        "trainer 1.11": lines_of_steps(("step 1", 49, 50, 60), ("step 2", 110, 200, 210)),
        "loader 0.12": "0 starting\n5000000 epoch 1, step 1: preparing\n9000000 waiting for an order\n",
    }.items():
        (tmp_path / "trace" / f"{name}.txt").write_text(text)
    assert marks_of(tmp_path) == [(11, "epoch 1, step 1", 49.0, 39.0), (10, "epoch 1, step 2", 190.0, 80.0)]


def test_a_step_that_a_restart_repeats_is_marked_once(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    later = {
        "trainer 0.8": lines_of_steps(("step 1", 310, 350, 360)),
        "trainer 1.9": lines_of_steps(("step 1", 349, 350, 360)),
    }
    former = {
        "trainer 0.10": lines_of_steps(("step 1", 49, 50, 60)),
        "trainer 1.11": lines_of_steps(("step 1", 10, 50, 60)),
    }
    for name, text in former.items():
        (tmp_path / "trace" / f"{name}.txt").write_text(text)
    assert [mark[0] for mark in marks_of(tmp_path)] == [10]
    for name, text in later.items():
        (tmp_path / "trace" / f"{name}.txt").write_text(text.replace("0 starting", "100000000 starting", 1))
    assert marks_of(tmp_path) == [(9, "epoch 1, step 1", 349.0, 39.0)]


def test_a_lone_trainer_is_not_marked(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "trainer 0.10.txt").write_text(lines_of_steps(("step 1", 10, 50, 60)))
    assert marks_of(tmp_path) == []
