"""Class weights and a balanced sampler: the bits of any number of trainers, and of a run that was resumed."""

import json
import shutil
from pathlib import Path

import numpy as np
import over_hosts
import pytest
from conftest import make_folder
from training_runs import assert_same, newest, relative_difference, train

KEYS = {
    "n_epochs": 2,
    "logical_ranks": 4,
    "learning_rate": 0.02,
    "model": "smallnet",
    "double": False,
    "class_weights": "balanced",
    "sampler": "balanced",
    "lr_policy": "one_cycle",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images of 7 classes, most of them of one."""
    folder = make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)
    path = folder / "labels" / "train_labels.npy"
    labels = np.load(path)
    labels[:20] = 3
    np.save(path, labels)
    return folder


def record_of(place: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(newest(place).with_suffix(".json").read_text())
    return content


@pytest.mark.slow
def test_any_number_of_trainers_and_a_resumed_run_have_the_same_bits(data: Path, tmp_path: Path) -> None:
    """Weights, momenta, and the record of validations with its metrics by class."""
    results = {n: train(n, data, tmp_path / str(n), **KEYS) for n in (1, 2, 4)}
    for n in (2, 4):
        assert_same(results[n], results[1])
        assert record_of(tmp_path / str(n))["val_record"] == record_of(tmp_path / "1")["val_record"]
    train(2, data, tmp_path / "broken", stopped=True, **KEYS)
    start = newest(tmp_path / "broken")
    assert start.stem == "epoch_0001_at_8"
    shutil.copytree(tmp_path / "broken", tmp_path / "resumed")
    assert_same(train(4, data, tmp_path / "resumed", start=start, **KEYS), results[1])
    for key in ("class_weights", "sampler"):  # each of them makes a difference
        without = train(1, data, tmp_path / key, **{**KEYS, key: None})
        assert relative_difference(without, results[1]) > 1e-3


@pytest.mark.slow
def test_hosts_have_the_same_bits_too(data: Path, tmp_path: Path) -> None:
    one = train(1, data, tmp_path / "1", **KEYS)
    assert_same(over_hosts.train(2, 2, data, tmp_path / "2", **KEYS), one)
    assert record_of(tmp_path / "2" / "host0")["val_record"] == record_of(tmp_path / "1")["val_record"]


@pytest.mark.slow
def test_hosts_end_alike(data: Path, tmp_path: Path) -> None:
    """At a rate of nearly 0 the second epoch is not better, so patience ends the run on both hosts."""
    keys = {**KEYS, "patience": 1, "monitor": "loss", "learning_rate": 1e-30, "n_epochs": 4}
    over_hosts.train(2, 1, data, tmp_path, **keys)
    assert newest(tmp_path / "host0").stem == "epoch_0002"
