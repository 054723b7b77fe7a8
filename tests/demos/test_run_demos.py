"""Tests of demos/run.sh."""

import subprocess
from pathlib import Path

from conftest import ROOT
from limits import limit


def test_all_demos_run_with_a_python_that_a_relative_path_names(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest -f "$1"\n')
    python.chmod(0o755)
    command = [ROOT / "demos" / "run.sh", "./python"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(30))
    assert done.returncode == 0 and done.stdout.count("== ") == 10, done
