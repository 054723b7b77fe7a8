"""The Python blocks of docs/python.md, datasets.md and multilabel.md, run as programs of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from limits import limit

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = "n_epochs: 2\nbatch_size: 8\nprint_freq: 2\ndevices: [cpu]\nn_classes: 7\n"
# Modules with the functions that the examples call, which print their arguments.
WANDB = """
def init(**values): print("init", sorted(values))
def log(values): print("log", *values)
"""
MLFLOW = """
import contextlib
start_run = contextlib.nullcontext
def log_metric(name, value, step): print("metric", name, 0 <= value <= 1, step)
def log_artifacts(folder): print("artifacts", folder)
"""


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def run_block(text: str, data: Path, place: Path) -> str:
    (place / "data").mkdir()
    (place / "data" / "mine").symlink_to(data)
    (place / "config.yaml").write_text(SETTINGS)
    (place / "wandb.py").write_text(WANDB)
    (place / "mlflow.py").write_text(MLFLOW)
    (place / "example.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, ["init ['config', 'project']", "log progress/loss progress/error", "log validated/loss"]),
        pytest.param(
            1, ["metric error_top1 True 1", "metric error_top1 True 2", "artifacts "], marks=pytest.mark.slow
        ),
    ],
)
def test_the_callbacks_of_the_page_work(
    number: int, expected: list[str], shared_folder: Path, tmp_path: Path
) -> None:
    text = blocks("python.md")[number]
    assert len([line for line in text.splitlines() if line]) <= 12
    shown = run_block(text, shared_folder, tmp_path)
    assert [line for line in expected if line not in shown] == []


@pytest.mark.slow
def test_the_dataset_of_the_page_trains(shared_folder: Path, tmp_path: Path) -> None:
    (text,) = blocks("datasets.md")
    assert "done: " in run_block(text, shared_folder, tmp_path)


@pytest.mark.slow
def test_the_dataset_with_several_classes_trains(shared_folder: Path, tmp_path: Path) -> None:
    (text,) = blocks("multilabel.md")
    shown = run_block(text, shared_folder, tmp_path)
    assert "done: validation mAP " in shown and float(shown.split("mAP ")[-1]) > 0.5
