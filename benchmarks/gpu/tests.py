"""The ring of tests that need a GPU: pytest -m "gpu or multigpu". One that fails makes the section fail."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 120  # for one test, where pytest-timeout is there and the test asks for nothing else
_WORKERS = 4  # side by side, where pytest-xdist is there
# Those that look at how much of the device's memory is in use; nobody else may use it then.
_ALONE = "memory_comes_back"
# What a rehearsal runs, for want of a GPU.
_REHEARSED = """
import pytest
pytestmark = pytest.mark.gpu
def test_that_passes(): assert True
def test_whose_memory_comes_back(): assert True
def test_that_is_skipped(): pytest.skip("needs 2 NVIDIA GPUs")
"""


def run(setting: Setting, work: Path, record: Record) -> None:
    folder = _rehearsed(work) if setting.rehearsal else _ROOT / "tests"
    reports = work / "tests.jsonl"
    workers = ["-n", str(_WORKERS)] if importlib.util.find_spec("xdist") else []
    for words in ([*workers, "-k", f"not {_ALONE}"], ["-k", _ALONE]):
        code = _pytest(words, folder, reports, record)
        counts = count(reports)
        record.keep("counts", counts)
        if code not in (0, 1):
            record.fail(f"pytest {' '.join(words)}", f"ended with {code}")
    for name, reason in counts["failures"].items():
        record.fail(name, reason)
    if not counts["passed"]:
        record.fail("all tests", "not one has passed")


def _pytest(words: list[str], folder: Path, reports: Path, record: Record) -> int | str:
    """Its exit code, or why it has none. A test file that can't be imported must not stop the others."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu or multigpu", "-v", "-ra", *words]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.reports", "-o", f"timeout={_SECONDS}"]
    command += ["--continue-on-collection-errors", *map(str, _files(folder))]
    environment = {**os.environ, "TEST_REPORTS": str(reports)}
    try:
        return subprocess.run(
            command, cwd=folder.parent, env=environment, timeout=record.seconds_left()
        ).returncode
    except subprocess.TimeoutExpired:
        return "nothing: the section's time was over"


def _files(folder: Path) -> list[Path]:
    """Those with tests for GPUs. The others may import what a machine that only trains has not."""
    files = sorted(folder.glob("test_*.py"))
    return [file for file in files if re.search(r"mark\.(multi)?gpu", file.read_text(encoding="utf-8"))]


def count(reports: Path) -> dict[str, Any]:
    """Counts, the failed ones' last words and the skipped ones' reasons."""
    lines = reports.read_text(encoding="utf-8").splitlines() if reports.exists() else []
    words: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for found in map(json.loads, lines):
        words[found["outcome"]][found["name"]] = found["words"]
    passed = words["passed"].keys() - words["failed"].keys()  # a test can pass and then fail to tidy up
    return {
        "passed": len(passed),
        "failed": len(words["failed"]),
        "skipped": len(words["skipped"]),
        "failures": words["failed"],
        "reasons": words["skipped"],
    }


def _rehearsed(work: Path) -> Path:
    folder = work / "rehearsed_tests"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: one GPU\n    multigpu: several\n")
    (folder / "test_rehearsed.py").write_text(_REHEARSED)
    return folder
