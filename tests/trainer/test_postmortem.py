"""A loss that is not a number ends the run with the first minibatch that had it and a copy of tensors."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, make_config
from safetensors.torch import load_file

from lockstep.comm.messages import Order
from lockstep.config import read_yaml, resolve
from lockstep.data.dataset import open_dataset
from lockstep.data.sampling import EpochSamples
from lockstep.errors import UserError
from lockstep.network.recorder import HostStopwatch, Recorder
from lockstep.runs.plan import RunPlan
from lockstep.trainer.postmortem import Losses


@pytest.mark.parametrize("devices", ["[cpu, cpu]", pytest.param("[cpu]", marks=pytest.mark.slow)])
def test_step_rate_files_and_rows_are_named(program: Program, devices: str) -> None:
    running = program.run("learning_rate=1e30", "print_freq=1000", devices=devices, code=2)
    (kept,) = (running.run_folder / "postmortem").glob("*.json")
    record, last = json.loads(kept.read_text()), running.last_line()
    assert (record["epoch"], record["step"], record["learning_rate"]) == (1, 2, 1e30)
    assert "at epoch 1, step 2, with learning rate 1e+30" in last
    assert str(kept) in last and "lower learning_rate" in last

    config, _ = resolve([read_yaml(running.run_folder / "config.yaml")])
    split, size = open_dataset(config).train, config.batch_size * len(config.devices)
    order = EpochSamples(split.file_rows, config.shuffle, config.shuffle_block, config.seed, 1)
    named = []
    for rows, each in zip(order.rows(size, 2 * size), record["images"], strict=True):
        stretch = rows.first, rows.first + rows.count - 1
        assert (each["first_row"], each["last_row"]) == stretch
        assert each["file"] == split.files[rows.file].path
        named.append(f"{Path(each['file']).name} rows {stretch[0]} to {stretch[1]}")
    assert ", ".join(named[:3]) in last

    assert "weights/conv1.weight" in record["not_finite"]
    tensors = load_file(kept.with_suffix(".safetensors"))
    assert not tensors["weights/conv1.weight"].isfinite().all()
    assert list((running.run_folder / "checkpoints").iterdir()) == []


# A network whose loss is infinite in one pass of the training, the first of which is number 1.
SPOILED = """
import models.smallnet

class Model(models.smallnet.Model):
    def __init__(self, n_classes, bad):
        super().__init__(n_classes)
        self.n_passes, self.bad = 0, bad

    def forward(self, images):
        self.n_passes += self.training
        return super().forward(images) * (float("inf") if self.n_passes == self.bad else 1.0)
"""


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (12, ("print_freq=5",)),  # of 12 steps: after the last line of progress, before validation
        pytest.param(3, ("print_freq=5", "checkpoint_minutes=1e-9"), marks=pytest.mark.slow),
    ],
    ids=["at the end of an epoch", "while saving"],
)
def test_a_loss_between_two_lines_of_progress_is_examined(
    program: Program, tmp_path: Path, bad: int, words: tuple[str, ...]
) -> None:
    """Validation or a checkpoint's writer would find, later, that something is not finite."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "spoiled.py").write_text(SPOILED)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "modules")}
    model = ("model=spoiled:Model", f"model_args={{bad: {bad}}}")
    running = program.run(*model, *words, devices="[cpu]", code=2, environment=environment)
    (kept,) = (running.run_folder / "postmortem").glob("*.json")
    record = json.loads(kept.read_text())
    assert (record["epoch"], record["step"]) == (1, bad)
    assert f"the loss is not finite at epoch 1, step {bad}, " in running.last_line()
    assert str(kept) in running.last_line()


def test_the_first_loss_that_is_not_finite_is_found_whatever_comes_after() -> None:
    recorder = Recorder(torch.device("cpu"), HostStopwatch())
    for step, loss in enumerate([1.0, 2.0, np.inf, 3.0, np.nan], 1):
        recorder.add(torch.tensor(loss), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
        recorder.end_batch(Order("train", 1, step, 2 * step, 2 * step + 2, 2 * step, 2 * step + 2))
    recorder.end_batch(Order("train", 1, 6, 12, 14, 14, 14))  # a trainer's share may be empty
    n_finite = int(recorder.sums()[3])
    assert recorder.orders[n_finite].step == 3
    recorder.reset()
    assert recorder.sums() == [0, 0, 0, 0] and recorder.orders == []


@pytest.mark.parametrize("writes", [True, False])
def test_only_a_process_that_writes_to_the_runs_folder_leaves_a_copy_there(
    tmp_path: Path, writes: bool
) -> None:
    """Hosts that share the folder would write the same files at once, and a replay is to write nothing."""
    recorder = Recorder(torch.device("cpu"), HostStopwatch())
    recorder.end_batch(Order("train", 1, 1, 0, 4, 0, 4))
    arena = SimpleNamespace(tensors={}, state=lambda: {"weights/a": torch.ones(2)})
    program: Any = SimpleNamespace(arena=arena, optimizer=SimpleNamespace(learning_rate=0.1))
    world = SimpleNamespace(local_rank=0)
    coordinator: Any = SimpleNamespace(world=world, barrier=lambda point: None)
    train: Any = SimpleNamespace(
        order_of=lambda *arguments, **keywords: EpochSamples((4,), "none", 1, 0, 1), name_of=str
    )
    plan = RunPlan(make_config(), tmp_path, None, writes=writes)
    losses = Losses(plan, program, recorder, coordinator, train)
    with pytest.raises(UserError, match="the loss is not finite at epoch 1, step 1") as error:
        losses.examine([[float("nan"), 0.0, 4.0, 0.0]])
    assert (tmp_path / "postmortem").exists() is writes
    assert ("has them all" in str(error.value)) is writes
