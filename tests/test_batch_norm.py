"""sync_batch_norm: batch normalisation by the statistics of the whole minibatch, over all trainers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_equivalence
from conftest import make_config, make_folder
from test_equivalence import relative_difference
from test_rules import SMOOTH, train
from torch import nn

from lockstep.errors import UserError
from lockstep.network.batch_norm import widest
from lockstep.network.build import build_model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 pictures, as in tests/test_rules.py."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


NORMS = {
    "weights": {"rule": "weights", "learning_rate": 0.01},
    "adamw": {"optimizer": "adamw", "clip_norm": 0.5},
    "accumulated": {"rule": "gradients", "accumulate": 2, "learning_rate": 0.01},
    "residual": {"model": "resnet20", "model_args": {"n": 1}, "learning_rate": 0.003, "n_epochs": 1},
}


SLOW = {"accumulated", "residual"}


@pytest.mark.parametrize(
    "values",
    [pytest.param(NORMS[name], marks=[pytest.mark.slow] * (name in SLOW), id=name) for name in NORMS],
)
def test_batch_normalisation_over_all_is_exact(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """Weights, optimizer's state, averages and statistics, with uneven shares."""
    keys = {**SMOOTH, "model_args": {"norm": True}, "sync_batch_norm": True, **values}
    one = train(1, data, tmp_path / "1", **keys)
    for n_trainers in (2, 3, 4):
        several = train(n_trainers, data, tmp_path / str(n_trainers), **keys)
        assert relative_difference(several, one) <= 1e-12
        for name in (name for name in one if name.startswith("buffers/")):
            assert np.abs(several[name] - one[name]).max() <= 1e-12 * np.abs(one[name]).max(), name


def test_batch_normalisation_over_all_has_trainers_without_pictures(tmp_path: Path) -> None:
    """9 pictures: 8, then one for four trainers."""
    data = make_folder(tmp_path / "set", n_train=9, n_val=3)
    keys = {**SMOOTH, "model_args": {"norm": True}, "sync_batch_norm": True}
    one, four = (train(n, data, tmp_path / str(n), **keys) for n in (1, 4))
    assert relative_difference(four, one) <= 1e-12


@pytest.mark.slow
def test_batch_normalisation_over_all_in_lower_precision(data: Path, tmp_path: Path) -> None:
    keys = {**SMOOTH, "model_args": {"norm": True}, "sync_batch_norm": True, "double": False}
    one, three = (train(n, data, tmp_path / str(n), **keys) for n in (1, 3))
    assert relative_difference(three, one) <= 1e-6
    one, three = (train(n, data, tmp_path / f"bf16 {n}", **keys, precision="bf16") for n in (1, 3))
    assert relative_difference(three, one) <= 0.05


class Norms(test_equivalence.TwoHeads):
    """With a kind of batch normalisation that has a forward pass of its own."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.norm = type("TheirNorm", (nn.BatchNorm2d,), {})(8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smallnet", "sync_batch_norm: this network has no batch normalisation"),
        (
            "test_batch_norm:Norms",
            "sync_batch_norm: norm is a test_batch_norm.TheirNorm, and only torch's own",
        ),
    ],
)
def test_batch_normalisation_that_cant_be_over_all_is_named(data: Path, model: str, message: str) -> None:
    config = make_config(model=model, data_folder=str(data), sync_batch_norm=True)
    with pytest.raises(UserError, match=message):
        widest(build_model(config, 7))


@pytest.mark.slow
def test_batch_normalisation_by_trainer_is_not_exact(data: Path, tmp_path: Path) -> None:
    """The tests above can fail."""
    keys = {**SMOOTH, "model_args": {"norm": True}}
    one, two = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2))
    assert relative_difference(two, one) > 1e-3
