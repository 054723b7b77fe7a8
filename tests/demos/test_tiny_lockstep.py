"""Tests of demos/tiny_lockstep.py: it is short, and it computes what train.py computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from limits import limit
from safetensors.torch import load_file

DEMO = ROOT / "demos" / "tiny_lockstep.py"
SETTINGS = [
    "model_args={dropout: 0}",
    "rand_mirror=false",
    "cpu_threads=1",
    "devices=[cpu, cpu]",
    "n_epochs=1",
]
RUN_DEMO = """
import sys
from pathlib import Path
import safetensors.torch
import tiny_lockstep

folder, target = map(Path, sys.argv[1:])
weights = tiny_lockstep.main(folder, n_epochs=1)
safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target)
"""


def run(*command: str | Path) -> None:
    """Run a Python program from the repository's root; fail with what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parent)}
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(100),
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """The folder of the digits as `make data` makes it: the repository's if it exists, else a new one."""
    folder = ROOT / "data" / "digits"
    if not (folder / "manifest.json").exists():
        folder = tmp_path / "digits"
        run("preprocessing/make_digits.py", tmp_path / "images")
        run("preprocessing/make_hkl.py", tmp_path / "images", folder, "--size", "36")
    return folder


def test_the_demo_has_at_most_150_lines() -> None:
    assert len(DEMO.read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_ends_with_the_weights_of_train_py_bit_for_bit(digits: Path, tmp_path: Path) -> None:
    run("-c", RUN_DEMO, digits, tmp_path / "demo.safetensors")
    places = [f"data_folder={digits}", f"weights_dir={tmp_path}", "run_name=run"]
    run("train.py", *SETTINGS, "n_epochs=1", *places)
    of_demo = load_file(tmp_path / "demo.safetensors")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    of_program = load_file(checkpoint)
    names = {name.removeprefix("weights/") for name in of_program if name.startswith("weights/")}
    assert set(of_demo) == names
    for name, tensor in of_demo.items():
        assert torch.equal(tensor, of_program[f"weights/{name}"]), name
        assert tensor.abs().max() > 0
