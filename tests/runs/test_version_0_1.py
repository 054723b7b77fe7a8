"""A dataset, a run folder and checkpoints written by version 0.1.0 still open.

tests/golden/version_0_1 was made by 0.1.0: `run` holds two epochs, `resumed_to_epoch_4.safetensors` is what
0.1.0 saved after it had resumed that run and trained two more.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from forked_programs import forked
from limits import limit
from safetensors.numpy import load_file

from lockstep.config import read_run, resolve
from lockstep.optim.schedules import learning_rate
from lockstep.report import runlog
from lockstep.runs.stragglers import PHASES

OLD = Path("tests/golden/version_0_1")  # relative, as that run's config.yaml has it


def run(*arguments: str) -> str:
    done = subprocess.run(
        forked([sys.executable, *arguments]), cwd=ROOT, capture_output=True, text=True, timeout=limit(100)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_of_0_1_resumes_to_the_same_weights(tmp_path: Path) -> None:
    shutil.copytree(ROOT / OLD / "run", tmp_path / "run")
    run("train.py", "resume_train=True", f"weights_dir={tmp_path}", "run_name=run", "n_epochs=4")
    found = load_file(tmp_path / "run" / "checkpoints" / "epoch_0004.safetensors")
    expected = load_file(ROOT / OLD / "resumed_to_epoch_4.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_run_of_0_1_keeps_its_rates_by_epoch(tmp_path: Path) -> None:
    """Its config.yaml has no lr_update, and a cosine that changes with every step would be another run."""
    text = (ROOT / OLD / "run" / "config.yaml").read_text().replace("lr_policy: step", "lr_policy: cosine")
    (tmp_path / "config.yaml").write_text(text)
    config, _ = resolve([read_run(tmp_path / "config.yaml")])
    rates = [learning_rate(config, 2, [], share) for share in (0.0, 0.5)]
    assert config.lr_update == "epoch" and rates[0] == rates[1]
    (tmp_path / "config.yaml").write_text(text + "lr_update: auto\n")
    config, _ = resolve([read_run(tmp_path / "config.yaml")])
    assert learning_rate(config, 2, [], 0.5) < rates[0]


@pytest.mark.slow
def test_a_run_of_0_1_validates_and_reports(tmp_path: Path) -> None:
    shutil.copytree(ROOT / OLD / "run", tmp_path / "run")
    assert "9 images" in run("validate.py", str(tmp_path / "run"))
    run("-m", "lockstep.report", str(tmp_path / "run"))
    assert (tmp_path / "run" / "report.html").exists()
    points = runlog.read_run(tmp_path / "run").points
    assert {phase for point in points for phase in point.seconds} == {*PHASES}


def test_weights_of_0_1_start_a_new_run(tmp_path: Path) -> None:
    keys = ["model=tests.golden.tiny_network:Model", "n_epochs=1", "devices=[cpu]", "batch_size=8"]
    pretrained = f"pretrained={ROOT / OLD / 'run'}"
    keys += [f"data_folder={OLD / 'dataset'}", f"weights_dir={tmp_path}", "run_name=new", pretrained]
    run("train.py", *keys)
    assert (tmp_path / "new" / "checkpoints" / "epoch_0001.safetensors").exists()
