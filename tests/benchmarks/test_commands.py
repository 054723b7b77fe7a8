"""Benchmarks start under the names that the documents give them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from limits import limit

from benchmarks.__main__ import BENCHMARKS
from benchmarks.loading import changing
from benchmarks.loading.augmenting import make_folder

AREAS = ("gpu", "hosts", "peers", "recipes", "synk")  # python -m benchmarks.<area>
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


@pytest.mark.slow
def test_the_benchmarks_start_without_packages_of_setup_test() -> None:
    hidden = "import sys; sys.modules['hickle'] = None; import benchmarks.__main__"
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, timeout=limit(60)
    )
    assert done.returncode == 0, done.stderr


def test_changing_measures_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 2: the loader makes images of the network's size."""
    monkeypatch.setattr(changing, "BATCH", 2)
    make_folder(tmp_path / "set", batch=2)
    changing.loading(tmp_path / "set", crop="random_resized")()
