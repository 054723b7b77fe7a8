"""A plugin for pytest (-p benchmarks.gpu.reports) that appends how each test went to the file $TEST_REPORTS.

A line a test, at once: what is in the file is good however pytest ends.
"""

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Append the outcome of a test; pytest calls it."""
    if report.when == "call" or report.outcome != "passed":  # setting up and tidying up count where they fail
        _append(report.nodeid, report.outcome, report)


def pytest_collectreport(report: Any) -> None:
    """Append a file that can't be collected; pytest calls it."""
    if report.outcome == "failed":
        _append(report.nodeid, "failed", report)


def _append(name: str, outcome: str, report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started the workers hears of everything
        return
    place = report.longrepr  # of a skipped one: (file, line, reason)
    words = str(place[2] if isinstance(place, tuple) else place or "").strip()
    with open(os.environ["TEST_REPORTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "outcome": outcome, "words": words[-300:]}) + "\n")
