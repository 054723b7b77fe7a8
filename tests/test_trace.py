"""What every process did, on one clock."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import Program

from lockstep.trace.__main__ import main
from lockstep.trace.spans import events_of


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
        ("trainer", "meeting the others"),
        ("trainer", "exchanging"),
        ("loader", "waiting for an order"),
        ("loader", "preparing"),
    } <= whats
    # One clock: within a step, both trainers begin to exchange when both have come.
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


def test_a_line_that_a_kill_has_cut_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "loader 0.17.txt").write_text("1000 a: b\n3000 c (d: e)\n5000 f\n60")
    spans = [(e["name"], e["args"]["at"], e["ts"], e["dur"]) for e in events_of(tmp_path) if e["ph"] == "X"]
    assert spans == [("b", "a", 0.0, 2.0), ("c", "c (d: e)", 2.0, 2.0)]
