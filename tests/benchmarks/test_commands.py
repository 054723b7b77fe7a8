"""Benchmarks start under the names that the documents give them."""

import importlib
import subprocess
import sys

import pytest
from conftest import ROOT
from limits import limit

from benchmarks.__main__ import BENCHMARKS

AREAS = ("exchange", "flow", "gpu", "hosts", "peers", "recipes", "synk")  # python -m benchmarks.<area>
PROGRAMS = ("drift", "rules", "simulate", "kernels.changes")


@pytest.mark.parametrize("name", [*(f"{area}.__main__" for area in AREAS), *PROGRAMS])
def test_every_command_imports(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_an_unknown_benchmark_is_refused_with_the_names_of_all() -> None:
    command = [sys.executable, "-m", "benchmarks", "nothing"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert refused.returncode == 2 and "unknown benchmark: nothing. Choose from" in refused.stderr
    assert all(name in refused.stderr for name in BENCHMARKS)
