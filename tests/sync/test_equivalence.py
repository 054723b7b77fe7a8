"""The proofs: N trainers are one trainer with N times the batch, and replicas are bitwise equal.

Everything runs in the Trainer itself, in real processes. Only the launcher is left out.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_config, make_folder
from training_runs import EXACT, make_trainer, relative_difference

from benchmarks import drift
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.launch.ranks import run_ranks


def train_rank(
    rank: int, pipes: dict[int, Pipe], config: Config, place: Path, double: bool
) -> dict[str, np.ndarray]:
    """Trains to the end in this process; returns the arena's tensors."""
    trainer, _keep_open = make_trainer(rank, pipes, config, place, double)
    assert not trainer.run()
    return {name: tensor.numpy().copy() for name, tensor in trainer.program.arena.tensors.items()}


def train_n(
    n_trainers: int, data: Path, place: Path, double: bool, **values: object
) -> list[dict[str, np.ndarray]]:
    (place / "checkpoints").mkdir(parents=True)
    fixed = {"data_folder": str(data), "para_load": False, "batch_size": 8 // n_trainers, "shuffle_block": 3}
    config = make_config(devices=["cpu"] * n_trainers, **{**fixed, **values})
    return run_ranks(train_rank, n_trainers, config, place, double)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """85 images: 11 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=85, n_val=9)


@pytest.mark.parametrize(
    ("model", "double", "bound"),
    [
        pytest.param("smallnet", True, 1e-10, id="float64"),
        pytest.param("smoothnet", False, 1e-5, id="float32", marks=pytest.mark.slow),
    ],
)
def test_n_trainers_are_one_with_n_times_the_batch(
    data: Path, tmp_path: Path, model: str, double: bool, bound: float
) -> None:
    """Weights and momenta after 55 steps, without dropout.

    In float32 the network has no kinks: there, a difference in the last bit can move a rectifier or a maximum
    to its other side, which changes a gradient by much more than rounding does.
    """
    values = {"n_epochs": 5, "learning_rate": 0.0003, "model": model, "model_args": {"dropout": 0.0}}
    one = train_n(1, data, tmp_path / "1", double, **values)[0]
    other = train_n(1, data, tmp_path / "0", double, **{**values, "weight_decay": 0.01})[0]
    assert relative_difference(other, one) > 10 * bound  # a small difference would show
    for n_trainers in (2, 4):
        several = train_n(n_trainers, data, tmp_path / str(n_trainers), double, **values)
        assert relative_difference(several[0], one) <= bound


@pytest.mark.slow
def test_the_drift_that_is_measured_is_rounding(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/drift.py: in float64 next to nothing is left, and a shaken last bit is seen at once."""
    monkeypatch.setattr(drift, "DATA", {"data_folder": str(data), "n_classes": 7})
    one = drift.states(1, "smallnet", torch.float64)
    two = drift.differences(drift.states(2, "smallnet", torch.float64), one)
    shaken = drift.differences(drift.states(1, "smallnet", torch.float64, shaken=True), one)
    assert all(max(two[kind]) <= 1e-10 for kind in drift.KINDS)
    assert 1e-17 < shaken["weights"][0] < 1e-13 and len(one) == len(drift.STEPS)


def test_dropout_crops_and_mirrors_are_the_same_for_any_n(data: Path, tmp_path: Path) -> None:
    values = {"n_epochs": 2, "learning_rate": 0.002, "use_nesterov_momentum": True}
    one = train_n(1, data, tmp_path / "1", True, **values)[0]
    two = train_n(2, data, tmp_path / "2", True, **values)[0]
    assert relative_difference(two, one) <= 1e-10


@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_is_linear_in_the_gradient_is_exact_for_any_n(
    data: Path, tmp_path: Path, accumulate: int
) -> None:
    """Auxiliary losses, smoothed labels, moving averages, accumulation; the last step is a smaller one."""
    values = {"n_epochs": 2, "accumulate": accumulate, **EXACT}
    one = train_n(1, data, tmp_path / "1", True, **values)[0]
    two = train_n(2, data, tmp_path / "2", True, **values)
    assert relative_difference(two[0], one) <= 1e-10
    assert all(two[0][name].tobytes() == two[1][name].tobytes() for name in one)


@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.8, "cutmix": 1.0}], ids=["plain", "mixed"])
def test_accumulated_minibatches_are_one_large_minibatch(
    data: Path, tmp_path: Path, mixed: dict[str, object]
) -> None:
    """3 x 8 images a step and 24; the last step of an epoch has 13 and none is left out."""
    values = {"n_epochs": 2, **EXACT, **mixed}
    large = train_n(1, data, tmp_path / "1", True, **values, batch_size=24)[0]
    for n_trainers in (1, 2):
        place = tmp_path / f"accumulated{n_trainers}"
        several = train_n(n_trainers, data, place, True, **values, accumulate=3)[0]
        assert relative_difference(several, large) <= 1e-10
    other = train_n(1, data, tmp_path / "2", True, **values, accumulate=2)[0]
    assert relative_difference(other, large) > 1e-4


def test_statistics_of_batch_normalisation_are_the_mean_of_the_trainers(tmp_path: Path) -> None:
    """One step of 8 images: the mean of halves' means is that of all; of variances it is not."""
    data = make_folder(tmp_path / "set", n_train=8, n_val=3)
    values = {"n_epochs": 1, **EXACT, "model_args": {"norm": True}}
    one = train_n(1, data, tmp_path / "1", True, **values)[0]
    first, second = train_n(2, data, tmp_path / "2", True, **values)
    mean, variance = (f"buffers/norm.running_{name}" for name in ("mean", "var"))
    assert np.abs(one[mean]).min() > 0 and np.allclose(first[mean], one[mean], rtol=1e-10)
    assert not np.allclose(first[variance], one[variance], rtol=1e-6)
    assert np.allclose(first[variance], one[variance], rtol=0.1)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert np.allclose(first["ema/norm.running_mean"], 0.1 * first[mean])


@pytest.mark.parametrize(
    "values", [{"optimizer": "adamw"}, {"optimizer": "lars"}, {"clip_norm": 0.1}], ids=str
)
def test_what_is_not_exact_keeps_replicas_equal(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**EXACT, "learning_rate": 0.001, "n_epochs": 1, "rule": "weights", **values}
    one = train_n(1, data, tmp_path / "1", True, **keys)[0]
    first, second = train_n(2, data, tmp_path / "2", True, **keys)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert relative_difference(first, one) > 1e-6


@pytest.mark.parametrize("n_trainers", [2, 3, 4])
def test_replicas_are_bitwise_equal(data: Path, tmp_path: Path, n_trainers: int) -> None:
    first, *others = train_n(n_trainers, data, tmp_path / "r", False, n_epochs=2)
    for other in others:
        assert all(first[name].tobytes() == other[name].tobytes() for name in first)


def test_more_trainers_than_pictures_in_the_last_minibatch(tmp_path: Path) -> None:
    """17 images and 4 trainers of 2: the third minibatch has one image, three trainers have none."""
    data = make_folder(tmp_path / "set", n_train=17, n_val=3)
    values = {"n_epochs": 2, "learning_rate": 0.002, "model_args": {"dropout": 0.0}}
    one = train_n(1, data, tmp_path / "1", True, **values)[0]
    four = train_n(4, data, tmp_path / "4", True, **values)
    assert relative_difference(four[3], one) <= 1e-10
