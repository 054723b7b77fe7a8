"""The report's rows of times by trainer, and the doctor's words on a run, from logs that are written here."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.doctor.waiting import examine_run
from lockstep.report.__main__ import main
from lockstep.report.runlog import read_run
from lockstep.runs.stragglers import PHASES, measure

N_STEPS = 20


def line_of(epoch: int, n_ranks: int = 3, slow: int | None = 1) -> dict[str, Any]:
    """Return an epoch's line of the log, in which trainer `slow` computes three times as long."""
    times = np.full((n_ranks, N_STEPS, len(PHASES)), 0.001)
    times[:, :, 1] = 0.01
    if slow is not None:
        times[:, :, 2] += 0.02
        times[slow, :, 1:3] = 0.03, 0.001
    return {"event": "rank_times", "time": 1000.0 + epoch, **asdict(replace(measure(times), epoch=epoch))}


def write_run(folder: Path, *lines: dict[str, Any]) -> Path:
    progress = {"event": "progress", "time": 1000.5, "epoch": 1, "step": 20, "n_steps": 20, "loss": 1.0}
    folder.mkdir()
    events = [{"event": "started", "time": 1000.0}, progress, *lines]
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.yaml").write_text("n_epochs: 4\n")
    return folder


def page_of(run: Path) -> str:
    assert main([str(run), "--no-examples"]) == 0
    return (run / "report.html").read_text()


def test_the_page_names_the_slow_trainer_and_has_a_row_for_each(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", *(line_of(epoch) for epoch in (1, 2, 3))))
    assert "Trainer 1 was the last in 100% of the steps, and the others waited" in page
    assert "because of its compute" in page and "shares: auto" in page
    assert page.count('<div class="bar rank">') == 3 and "100% of 40" in page  # of the later half: 2 of 3
    even = page_of(write_run(tmp_path / "even", line_of(1, slow=None)))
    assert "No single trainer makes the others wait notably." in even and "because of" not in even


def test_a_run_of_one_trainer_has_no_such_part(tmp_path: Path) -> None:
    assert "Who waits for whom" not in page_of(write_run(tmp_path / "run"))


def test_epochs_that_are_repeated_or_have_other_trainers_do_not_count(tmp_path: Path) -> None:
    lines = [line_of(1, n_ranks=2), line_of(1, slow=0), line_of(2, slow=0), line_of(2, slow=2)]
    run = read_run(write_run(tmp_path / "run", *lines))
    assert [(each.epoch, len(each.ranks)) for each in run.rank_times] == [(1, 3), (2, 3)]
    assert run.newest_times and run.newest_times.straggler and run.newest_times.straggler.rank == 2
    fewer = read_run(write_run(tmp_path / "fewer", *lines, line_of(3, n_ranks=2)))
    assert fewer.newest_times and fewer.newest_times.n_steps == N_STEPS


@pytest.mark.parametrize(
    "damage",
    [
        {"ranks": None},
        {"ranks": []},
        {"ranks": [3, 4]},
        {"n_steps": 0},
        {"n_steps": "many"},
        {"n_steps": 1e300},
        {"seconds": None},
        {"n_hosts": 99},
        {"n_hosts": 2},  # the exchange can't be a cause then
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    run = read_run(write_run(tmp_path / "run", line_of(1), {**line_of(2), **damage}))
    assert [each.epoch for each in run.rank_times] == [1]
    assert any("damaged times of trainers were left out" in note for note in run.notes)


def test_the_doctor_says_what_the_page_says(tmp_path: Path) -> None:
    found = list(examine_run(write_run(tmp_path / "run", line_of(1))))
    text = " ".join(each.text for each in found)
    assert "Trainer 1 was the last in 100%" in text and "Its device computes longer" in text
    assert {each.name for each in found} == {"waiting", "its compute", ""} and all(
        len(each.text) <= 80 for each in found
    )
    (even,) = examine_run(write_run(tmp_path / "even", line_of(1, slow=None)))
    assert even.text == "no single trainer makes the others wait notably"
    (lone,) = examine_run(write_run(tmp_path / "lone"))
    assert "no whole epoch of several trainers" in lone.text
