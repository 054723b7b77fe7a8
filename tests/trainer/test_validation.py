"""The validations and the end of a run: metrics in the log, `val_freq`, `patience`, `monitor`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Program, Running, make_folder
from training_runs import assert_same, newest, train


def validated(running: Running) -> list[dict[str, Any]]:
    lines = (running.run_folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "validated"]


def test_the_log_has_the_metrics_of_every_class(program: Program, shared_folder: Path) -> None:
    (event,) = validated(program.run("n_epochs=1"))
    labels = np.load(shared_folder / "labels" / "val_labels.npy")
    assert event["classes"]["support"] == np.bincount(labels, minlength=7).tolist()
    assert sum(count for *_, count in event["confusion"]) == event["n_images"] == 33
    right = sum(count for label, answer, count in event["confusion"] if label == answer)
    assert event["error_top1"] == pytest.approx(1 - right / 33)
    assert event["means"]["weighted_recall"] == pytest.approx(right / 33)
    record = json.loads((program.place / "runs/run/checkpoints/epoch_0001.json").read_text())["val_record"]
    assert record[0]["macro_f1"] == event["means"]["macro_f1"]


@pytest.mark.slow
def test_val_freq_validates_every_second_epoch_and_the_last(program: Program) -> None:
    """A run resumes after an epoch that was not validated."""
    words = ("val_freq=2", "snapshot_freq=1", "devices=[cpu]")
    running = program.run("n_epochs=3", *words)
    assert [event["epoch"] for event in validated(running)] == [2, 3]
    names = sorted(path.stem for path in (running.run_folder / "checkpoints").glob("*.json"))
    assert names == ["epoch_0001", "epoch_0002", "epoch_0003"]
    again = program.run("resume_train=true", "load_epoch=1", "n_epochs=3", *words)
    branch = again.run_folder.with_name("run-from-epoch_0001")
    both = [
        (each / "checkpoints" / "epoch_0003.safetensors").read_bytes()
        for each in (branch, running.run_folder)
    ]
    assert both[0] == both[1]


@pytest.mark.slow
def test_patience_ends_a_run_and_says_so(program: Program) -> None:
    """At a rate of nearly 0 no epoch is better than the first."""
    words = ("n_epochs=9", "patience=2", "monitor=loss", "learning_rate=1e-30", "snapshot_freq=9")
    running = program.run(*words)
    assert [event["epoch"] for event in validated(running)] == [1, 2, 3]
    assert "no better loss within patience (2), so the run ends" in running.output()
    assert (running.run_folder / "checkpoints" / "epoch_0003.json").exists()
    refused = program.run("resume_train=true", code=2)
    assert "the run has ended, with no better loss within patience (2); raise patience" in refused.last_line()
    program.run("resume_train=true", "patience=3")
    assert validated(running)[-1]["epoch"] == 4


def test_weights_that_do_not_fit_the_dataset_end_the_run_before_it_begins(program: Program) -> None:
    refused = program.run("class_weights=[1, 2]", code=2)
    assert refused.last_line().startswith("lockstep: class_weights: 2 weights for 7 classes. Give one for")


def test_the_best_checkpoint_by_the_monitor_is_kept(program: Program) -> None:
    words = ("n_epochs=5", "snapshot_freq=1", "keep_checkpoints=1", "monitor=macro_f1", "devices=[cpu]")
    running = program.run(*words)
    f1 = {event["epoch"]: event["means"]["macro_f1"] for event in validated(running)}
    best = max(f1, key=lambda epoch: (f1[epoch], -epoch))
    names = {path.stem for path in (running.run_folder / "checkpoints").glob("*.json")}
    assert names == {f"epoch_{best:04d}", "epoch_0005"}


@pytest.mark.slow
def test_trainers_end_alike(shared_folder: Path, tmp_path: Path) -> None:
    """Three trainers with uneven shares stop after the same epoch, with equal replicas."""
    keys = {"patience": 1, "monitor": "loss", "learning_rate": 1e-30, "n_epochs": 6, "model": "smallnet"}
    several = train(3, shared_folder, tmp_path / "3", **keys)
    assert newest(tmp_path / "3").stem == "epoch_0002"
    assert_same(several, train(3, shared_folder, tmp_path / "again", **keys))


def test_validation_changes_no_weights(tmp_path: Path) -> None:
    """The second trainer has no image of the last validation minibatch, so it calls the network less."""
    data = make_folder(tmp_path / "set", n_train=16, n_val=9)
    keys = {"model": "small_networks:Normalizing", "n_epochs": 2, "double": False}
    validated = train(2, data, tmp_path / "each", **keys)
    assert_same(validated, train(2, data, tmp_path / "last", val_freq=2, **keys))
