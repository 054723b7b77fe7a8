"""The parts of campaigns.chaos that can be tested without signals; tests/launch/test_ending.py has those."""

import json
from pathlib import Path

import pytest

from campaigns import chaos
from campaigns.cases import HOSTS, PROGRAMS, RULES, SIGNALS, Case, cases
from campaigns.watching import Watched


def test_cases_are_the_same_for_a_seed_and_cover_what_there_is() -> None:
    found = list(cases(500, 1))
    assert found[:20] == list(cases(20, 1)) != list(cases(20, 2))
    assert {case.program for case in found} == set(PROGRAMS)
    assert {case.signal for case in found} == set(SIGNALS)
    assert {case.rule for case in found} == {*RULES, "none"}
    assert {case.n_processes for case in found} == {1, 2, 3, 4}
    kinds = {case.victim.split()[0] for case in found} | {case.victim for case in found}
    assert {case.host for case in found if case.program == HOSTS} == {0, 1}
    assert kinds >= {"launcher", "trainer", "loader", "rank", "the template", "the group"}


def test_an_interrupted_campaign_goes_on_and_counts_every_case_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def run_case(case, place, patience):
        if len(ran) == 3:
            ran.append(-1)
            raise KeyboardInterrupt
        ran.append(len(ran))
        problems = ["it had not ended 10 s after"] if len(ran) == 2 else []
        return {"kept": "broken" if problems else "kept", "problems": problems, "seconds": 0.1}

    monkeypatch.setattr(chaos, "run_case", run_case)
    words = ["5", "--results", str(tmp_path)]
    assert chaos.main(words) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert chaos.main(words) == 1
    assert len(ran) == 3 + 1 + 2
    text = (tmp_path / "chaos.md").read_text()
    assert "5 cases (5 were hit), seed 1: 1 broken promises" in text
    assert "it had not ended 10 s after" in text


def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"kept": "kept", "problems": [], "seconds": None}
    monkeypatch.setattr(chaos, "run_case", lambda case, place, patience: dict(entry))


def test_another_seed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all(monkeypatch)
    for seed in ("1", "2"):
        assert chaos.main(["3", "--seed", seed, "--results", str(tmp_path)]) == 0
        assert len((tmp_path / f"chaos_{seed}.jsonl").read_text().splitlines()) == 3
    titles = [line for line in (tmp_path / "chaos.md").read_text().splitlines() if line.startswith("###")]
    assert [title.split(", ")[1] for title in titles] == [
        "seed 2: 0 broken promises",
        "seed 1: 0 broken promises",
    ]


def test_shares_make_up_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_all(monkeypatch)
    words = ["20", "--results", str(tmp_path), "--share"]
    assert chaos.main([*words, "1/2"]) == 0
    assert "of 20 are left to others" in capsys.readouterr().out
    assert not (tmp_path / "chaos.md").exists()
    assert chaos.main([*words, "2/2"]) == 0
    assert len((tmp_path / "chaos_1.jsonl").read_text().splitlines()) == 20
    assert "20 cases" in (tmp_path / "chaos.md").read_text()


@pytest.mark.parametrize(
    ("program", "victim", "statuses", "text"),
    [
        ("train.py", "launcher", (143,), "stopped as asked"),
        ("train.py", "the group", (143,), "stopped as asked"),
        ("train.py", "trainer 1", (0,), ""),
        ("train.py", "the template", (0,), ""),
        ("synk", "rank 1", (1,), "RankLost"),
        ("flow", "launcher", (-1,), ""),
    ],
)
def test_a_closed_terminal_concerns_the_launcher_only(
    program: str, victim: str, statuses: tuple[int, ...], text: str
) -> None:
    case = Case(program, "SIGHUP", victim, 1.0, "none", 2)
    assert case.expected(0) == (statuses, text)


@pytest.mark.parametrize("leaving", ["trainer 0", "trainer 1"])
def test_only_without_trainer_0_a_launchers_death_may_go_without_a_word(tmp_path: Path, leaving: str) -> None:
    (trace := tmp_path / "run/trace").mkdir(parents=True)
    for name in ("trainer 0", "trainer 1"):
        (trace / f"{name}.1.txt").write_text("1 exchanging\n" + "2 leaving\n" * (name == leaving))
    killed = Watched(tmp_path, [], ["sh", "-c", "kill -KILL $$"])
    started = {"event": "started", "time": killed.since + 1.0, "trainer 0": 1}
    (tmp_path / "run/log.jsonl").write_text(json.dumps(started) + "\n")
    problems = list(chaos.problems_of(killed, Case(HOSTS, "SIGKILL", "launcher", 1.0, "none", 2), 0, 1.0))
    silence = "its last line does not say 'the launcher (pid': "
    assert problems == ([] if leaving == "trainer 0" else [silence])
