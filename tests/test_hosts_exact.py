"""Over several hosts training is what it is on one, rule by rule: in real processes, over sockets."""

from pathlib import Path
from typing import Any

import over_hosts
import pytest
import test_rules
from conftest import make_folder
from test_equivalence import relative_difference
from test_rules import FACTORS, SMOOTH, Tensors, assert_same


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 pictures: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def on_one(n_trainers: int, data: Path, place: Path, **keys: Any) -> Tensors:
    return test_rules.train(n_trainers, data, place, **keys)


HARD = {
    "clipped lars": {"optimizer": "lars", "clip_norm": 0.1, "learning_rate": 0.5, "accumulate": 2},
    "sgd by weights": {"rule": "weights", "learning_rate": 0.01},
}


@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_hosts_are_as_exact_as_trainers_of_one(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**SMOOTH, "rule": "gradients", **values}
    one = on_one(4, data, tmp_path / "1", **keys)
    two = over_hosts.train(2, 2, data, tmp_path / "2", **keys)
    assert relative_difference(two, one) <= 1e-12


@pytest.mark.parametrize("places", [(2, 2), (2, 1)], ids=["2x2", "2x1"])
@pytest.mark.parametrize("factors", [False, True], ids=["gradients", "factors"])
def test_sums_that_begin_early_have_the_same_bits(
    data: Path, tmp_path: Path, places: tuple[int, int], factors: bool
) -> None:
    """Several buckets; in the last step of an epoch, of one picture, trainers have none."""
    keys = {**SMOOTH, **FACTORS, "factors": factors, "minibatch": 4, "n_epochs": 1, "bucket": 1 << 13}
    early = over_hosts.train(*places, data, tmp_path / "early", **keys)
    late = over_hosts.train(*places, data, tmp_path / "late", **keys, overlap=False)
    assert_same(early, late)
    one = on_one(2, data, tmp_path / "one", **{k: keys[k] for k in keys if k != "bucket"})
    assert relative_difference(early, one) <= 1e-12


OTHERS: dict[str, dict[str, Any]] = {
    "accumulated adamw": {"optimizer": "adamw", "clip_norm": 0.5, "accumulate": 3},
    "factors": {**FACTORS, "minibatch": 4, "optimizer": "adamw"},
}


@pytest.mark.parametrize("places", [(2, 2), (3, 1)], ids=["2x2", "3x1"])
@pytest.mark.parametrize("values", OTHERS.values(), ids=OTHERS)
def test_others_too(data: Path, tmp_path: Path, values: dict[str, Any], places: tuple[int, int]) -> None:
    keys = {**SMOOTH, "rule": "gradients", **values}
    one = on_one(places[0] * places[1], data, tmp_path / "1", **keys)
    assert relative_difference(over_hosts.train(*places, data, tmp_path / "2", **keys), one) <= 1e-12


@pytest.mark.parametrize("places", [(2, 1), (2, 2), (4, 1)], ids=["2x1", "2x2", "4x1"])
def test_parts_have_the_same_bits_over_hosts(data: Path, tmp_path: Path, places: tuple[int, int]) -> None:
    keys = {"n_epochs": 2, "parts": 4, "learning_rate": 0.02, "ema_decay": 0.9, "double": False}
    one = on_one(1, data, tmp_path / "1", **keys)
    assert_same(over_hosts.train(*places, data, tmp_path / "2", **keys), one)


@pytest.mark.parametrize("rule", ["local", "outer"])
def test_hosts_that_step_alone(data: Path, tmp_path: Path, rule: str) -> None:
    """Every step of a host of two is exact, so two such hosts are two trainers of twice the batch."""
    args = {"rule": rule, "rule_args": {"every": 3}}
    keys = {**SMOOTH, **args}
    one = on_one(2, data, tmp_path / "1", **keys)
    for n_local in (1, 2):
        place = tmp_path / f"two{n_local}"
        assert relative_difference(over_hosts.train(2, n_local, data, place, **keys), one) <= 1e-12
