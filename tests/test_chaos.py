"""What of campaigns.chaos can be seen without killing anybody; tests/test_ending.py kills."""

import argparse
from pathlib import Path

import pytest

from campaigns import chaos
from campaigns.cases import PROGRAMS, RULES, SIGNALS, cases


def test_cases_are_the_same_for_a_seed_and_cover_what_there_is() -> None:
    found = list(cases(500, 1))
    assert found[:20] == list(cases(20, 1)) != list(cases(20, 2))
    assert {case.program for case in found} == set(PROGRAMS)
    assert {case.signal for case in found} == set(SIGNALS)
    assert {case.rule for case in found} == {*RULES, "none"}
    assert {case.n_processes for case in found} == {1, 2, 3, 4}
    kinds = {case.victim.split()[0] for case in found} | {case.victim for case in found}
    assert kinds >= {"launcher", "trainer", "loader", "rank", "the helper", "the group"}


def test_an_interrupted_campaign_goes_on_and_counts_every_case_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def run_case(case, place, patience):
        if len(ran) == 3:
            ran.append(-1)
            raise KeyboardInterrupt
        ran.append(len(ran))
        return True, ["it had not ended 10 s after"] if len(ran) == 2 else []

    monkeypatch.setattr(chaos, "run_case", run_case)
    words = ["5", "--state", str(tmp_path / "state"), "--results", str(tmp_path)]
    assert chaos.main(words) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert chaos.main(words) == 1
    assert len(ran) == 3 + 1 + 2
    text = (tmp_path / "chaos.md").read_text()
    assert "5 programs of 1 to 4 processes, seed 1: 1 broken promises" in text
    assert "it had not ended 10 s after" in text


def test_another_seed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "run_case", lambda case, place, patience: (True, []))
    for seed in (1, 2):
        words = argparse.Namespace(n=3, seed=seed, state=tmp_path, patience=1.0)
        assert len(list(chaos.run_all(words))) == 3
    assert len(list(tmp_path.glob("seed_*.jsonl"))) == 2
