"""Integer buffers that a network computes with: equal in all trainers, though the last step lacks images."""

import shutil
from pathlib import Path
from typing import Any

import over_hosts
import pytest
from conftest import make_folder
from training_runs import assert_same, newest, train

KEYS = {
    "n_epochs": 2,
    "learning_rate": 0.02,
    "model": "small_replicas:Warming",
    "double": False,
    "global_batch_size": 9,
    "snapshot_freq": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: the last step of an epoch has one, so only trainer 0 calls the network."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def test_any_number_of_trainers_and_hosts_compute_with_the_same_counts(data: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**KEYS, "logical_ranks": 4}
    one = train(1, data, tmp_path / "1", **keys)
    assert one["buffers/calls"] == 10 and one["buffers/is_warm"]
    assert_same(train(2, data, tmp_path / "2", **keys), one)
    assert_same(over_hosts.train(2, 1, data, tmp_path / "hosts", **keys), one)


def test_a_resumed_run_has_the_counts_of_the_unbroken_one(data: Path, tmp_path: Path) -> None:
    unbroken = train(3, data, tmp_path / "unbroken", **KEYS)
    first = newest(tmp_path / "unbroken").with_name("epoch_0001.safetensors")
    (tmp_path / "resumed" / "checkpoints").mkdir(parents=True)
    for file in (first, first.with_suffix(".json")):
        shutil.copy(file, tmp_path / "resumed" / "checkpoints")
    start = tmp_path / "resumed" / "checkpoints" / first.name
    assert_same(train(3, data, tmp_path / "resumed", start=start, **KEYS), unbroken)
