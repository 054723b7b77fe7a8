"""The samples that campaigns.soak judges, and the command itself, for a few seconds."""

import json
from pathlib import Path

import pytest

from campaigns import soak
from campaigns.sampling import Limits, Sample, Series

MINUTE = 60.0


def series(
    memory=lambda n: 10**8, shared=lambda n: 0, descriptors=lambda n: 20, threads=lambda n: 3
) -> Series:
    """One sample a minute for an hour."""
    samples = [Sample(n * MINUTE, memory(n), shared(n), descriptors(n), threads(n)) for n in range(60)]
    return Series(samples)


@pytest.mark.parametrize(
    ("grows", "said"),
    [
        ({}, []),
        ({"memory": lambda n: 10**8 + n * 200_000}, ["memory grows by 12.0 MB an hour"]),
        ({"memory": lambda n: 10**8 + min(n, 10) * 10**7}, []),  # the warm-up
        ({"memory": lambda n: 10**8 + n % 7 * 10**6}, []),  # to and fro
        ({"shared": lambda n: n * 10_000}, ["shared memory grows by 0.6 MB an hour"]),
        ({"descriptors": lambda n: 20 + n // 20}, ["descriptors grow from 21 to 22"]),
        ({"descriptors": lambda n: 20 + n % 2}, []),
        ({"threads": lambda n: 3 + (n > 40)}, ["threads grow from 3 to 4"]),
    ],
)
def test_what_grows_is_found(grows: dict, said: list[str]) -> None:
    assert series(**grows).problems(Limits()) == said


@pytest.mark.slow
def test_the_command_trains_resumes_and_writes_its_table(shared_folder: Path, tmp_path: Path) -> None:
    keys = ["devices=[cpu]", "n_classes=7", "batch_size=8", "shuffle_block=4", "print_freq=2"]
    options = [word for key in keys for word in ("--set", key)]
    where = ["--data", str(shared_folder), "--results", str(tmp_path)]
    options = [*options, "--starts", "2", "--load", "1"]
    assert soak.main(["0.05", *options, *where]) in (0, 1)  # so short that it may grow
    text = (tmp_path / "soak.md").read_text()
    assert "in 2 starts beside 1 busy processes" in text
    for process in ("launcher", "trainer 0", "loader 0"):
        assert f"| 1 | {process} |" in text and f"| 2 | {process} |" in text
    found = json.loads((tmp_path / "soak.json").read_text())["problems"]
    assert not [problem for problem in found if "grow" not in problem]
