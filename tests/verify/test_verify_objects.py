"""verify.py: a run whose network and datasets were Python objects is verified if a module has them."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from forked_programs import forked
from limits import limit
from own_datasets import make_squares

import lockstep

KEYS = {"logical_ranks": 2, "global_batch_size": 8, "cpu_threads": 1, "devices": ["cpu"], "quiet": True}


def call(*words: object, code: int = 0) -> str:
    command = forked([sys.executable, str(ROOT / "verify.py"), *map(str, words)])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit(100))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.usefixtures("forked_runs")
def test_a_run_on_objects_is_verified_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    train_data, val_data = make_squares()
    more = {"n_classes": 4, "n_epochs": 1, "weights_dir": str(tmp_path), "run_name": "run", **KEYS}
    folder = lockstep.train(train_data=train_data, val_data=val_data, **more).folder
    assert "or name it: data=" in call(folder, code=2)
    words = ("data=own_datasets:make_squares", "--replay", 1)
    assert ": verified; 2 receipts up to step 12, 12 steps computed again" in call(folder, *words)
    assert "leave out the keys that change results" in call(folder, *words, "learning_rate=0.5", code=2)
