"""The time limits of all other tests, which follow the machine's speed."""

import multiprocessing
import os

import limits
import pytest
from hypothesis import settings


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits._MEASURED, "1.0")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(limits, "_count_cores", lambda: 2)


def test_a_limit_grows_with_the_load(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.limit(10) == 10
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.1, 0.1))
    assert limits.limit(10) == 40
    monkeypatch.setenv(limits._MEASURED, "5.0")
    assert limits.limit(10) == 50


def test_workers_share_what_was_measured_once(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits._MEASURED, "3.0")
    limits.measure(2)
    assert limits.limit(10) == 30
    monkeypatch.delenv(limits._MEASURED)
    limits.measure(2)
    assert 20 <= limits.limit(10) < 10_000  # two workers for two cores: each is slower for the other


def spin() -> None:
    while True:
        pass


@pytest.mark.slow
def test_other_work_is_measured(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits._MEASURED)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(6)]
    try:
        for other in others:
            other.start()
        limits.measure(1)
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
    assert limits.limit(10) > 20


def test_examples_have_no_deadline() -> None:
    assert settings().deadline is None
