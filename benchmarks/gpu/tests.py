"""The ring of tests that need a GPU: pytest -m "gpu or multigpu". One that fails makes the section fail."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 120  # for one test, where pytest-timeout is installed and the test asks for nothing else
_WORKERS = 4  # side by side, where pytest-xdist is installed
# Tests of how much of the device's memory is in use, by all processes: no other test may run beside them.
_ALONE = "memory_comes_back or nothing_leaks"
# What a rehearsal runs, for want of a GPU.
_REHEARSED = """
import pytest
pytestmark = pytest.mark.gpu
def test_that_passes(): assert True
def test_whose_memory_comes_back(): assert True
def test_that_is_skipped(): pytest.skip("needs 2 NVIDIA GPUs")
"""


# First what most depends on, then one whole training run; the rest is for another call.
_FIRST = (
    (
        "network/test_layers.py",
        "exchange/test_conformance.py",
        "loading/test_loading.py",
        "-k",
        f"not ({_ALONE})",
    ),
    ("kernels/test_gpu.py", "-k", "augments or (trains_as_cpus and batch_size)"),
)


def run(setting: Setting, work: Path, record: Record) -> None:
    """Kernels, memory and exchange, loading, and one training run."""
    if setting.rehearsal:
        _run_all([("test_rehearsed.py",)], _rehearsed(work), work, record)
    else:
        _run_all(list(_FIRST), _ROOT / "tests", work, record)


def run_rest(setting: Setting, work: Path, record: Record) -> None:
    """All the other tests that need a GPU; those last that must run alone."""
    if setting.rehearsal:
        _run_all([("test_rehearsed.py", "-k", "passes")], _rehearsed(work), work, record)
        return
    others = (*_FIRST[1][:1], "-k", f"not ({_ALONE}) and not ({_FIRST[1][2]})")
    calls = [others, ("kernels/test_gpu.py", "exchange/test_conformance.py", "-k", _ALONE)]
    calls += [("synk/test_synk_gpu.py", "flow/test_flow_cuda.py")]
    _run_all(calls, _ROOT / "tests", work, record)


def _run_all(calls: list[tuple[str, ...]], folder: Path, work: Path, record: Record) -> None:
    reports = work / f"tests-{time.time_ns()}.jsonl"
    counts = count(reports)
    for words in calls:
        parallel = _ALONE not in words and importlib.util.find_spec("xdist")
        code = _pytest([*(["-n", str(_WORKERS)] if parallel else []), *words], folder, reports, record)
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
    command = [sys.executable, "-m", "pytest", "-m", "gpu or multigpu", "-v", "-ra"]
    command += [str(folder / word) if word.endswith(".py") else word for word in words]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.reports", "-o", f"timeout={_SECONDS}"]
    command += ["--continue-on-collection-errors"]
    environment = {**os.environ, "TEST_REPORTS": str(reports)}
    try:
        return subprocess.run(
            command, cwd=folder.parent, env=environment, timeout=record.seconds_left()
        ).returncode
    except subprocess.TimeoutExpired:
        return "nothing: the section's time was over"


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
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: one GPU\n    multigpu: several\n")
    (folder / "test_rehearsed.py").write_text(_REHEARSED)
    return folder
