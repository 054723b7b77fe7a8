"""Rules: what each promises, in real processes: exactness, equal bits, checkpoints of one read by another."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_config, make_folder
from small_networks import FullLayers
from small_replicas import make_replica
from training_runs import (
    FACTORS,
    HARD,
    SMOOTH,
    assert_same,
    newest,
    relative_difference,
    train,
)

from lockstep.network.factors import factored_layers
from lockstep.pretrained.weights import start_with


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


SHORT = ("adamw", "clipped lars", "accumulated adamw")  # each optimizer and each difficulty once


@pytest.mark.parametrize(
    "values",
    [pytest.param(HARD[k], id=k, marks=[] if k in SHORT else [pytest.mark.slow]) for k in HARD],
)
def test_gradients_are_exact_for_every_optimizer(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """Two heads, dropout, smoothed labels, moving averages, uneven shares; optimizer's state and all."""
    keys = {**SMOOTH, "rule": "gradients", **values}
    one = train(1, data, tmp_path / "1", **keys)
    for n_trainers in (2, 3):
        several = train(n_trainers, data, tmp_path / str(n_trainers), **keys)
        assert relative_difference(several, one) <= 1e-12
        assert several.keys() == one.keys()


def test_layers_that_pay_have_factors() -> None:
    """Large ones that are trained and used once for an image; as large as two trainers' rows may get."""
    model, keys = FullLayers(7), {"devices": ["cpu"] * 2, **FACTORS}
    before = torch.get_rng_state()
    layers = factored_layers(model, make_config(batch_size=4, accumulate=2, **keys), (32, 32))
    assert [(layer.name, layer.n_rows) for layer in layers] == [
        ("first.weight", 8),
        ("wide.weight", 8),
        ("odd.weight", 8),
    ]
    assert torch.equal(torch.get_rng_state(), before) and model.training
    many = factored_layers(model, make_config(batch_size=40, **keys), (32, 32))
    assert [layer.name for layer in many] == ["first.weight"]  # 80 x 612 < 51,200
    assert factored_layers(model, make_config(batch_size=4, **{**keys, "factors": False}), (32, 32)) == []


FACTORED = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.01, "n_epochs": 1},
    "clipped lars": {"optimizer": "lars", "clip_norm": 0.1, "learning_rate": 0.5},
    "accumulated adamw": {"optimizer": "adamw", "accumulate": 3, "ema_decay": 0.9},
}


@pytest.mark.parametrize(
    ("n_trainers", "values"),
    [
        (3, FACTORED["sgd"]),
        *(pytest.param(n, values, marks=pytest.mark.slow) for values in FACTORED.values() for n in (2, 3, 4)),
    ],
)
def test_factors_are_exact(data: Path, tmp_path: Path, n_trainers: int, values: dict[str, Any]) -> None:
    """Uneven shares, and a last step of one image, which leaves trainers without; with all state."""
    keys = {**SMOOTH, **FACTORS, "global_batch_size": 4, **values}
    one = train(1, data, tmp_path / "1", **keys)
    several = train(n_trainers, data, tmp_path / "several", **keys)
    assert relative_difference(several, one) <= 1e-12
    assert several.keys() == one.keys()


@pytest.mark.slow
def test_factors_in_bfloat16_are_as_near_as_gradients(data: Path, tmp_path: Path) -> None:
    keys = {**SMOOTH, **FACTORS, "precision": "bf16", "double": False}
    factors = train(2, data, tmp_path / "factors", **keys)
    gradients = train(2, data, tmp_path / "gradients", **{**keys, "factors": False})
    assert 0 < relative_difference(factors, gradients) < 0.01


@pytest.mark.slow
def test_a_run_by_factors_goes_on_as_it_was(data: Path, tmp_path: Path) -> None:
    """With momenta that no single block of gradients has room for."""
    keys = {**SMOOTH, **FACTORS, "optimizer": "adamw"}
    whole = train(2, data, tmp_path / "whole", **keys)
    train(2, data, tmp_path / "half", **{**keys, "n_epochs": 1})
    assert_same(train(2, data, tmp_path / "half", start=newest(tmp_path / "half"), **keys), whole)


def test_adamw_by_weights_is_not_exact(data: Path, tmp_path: Path) -> None:
    """The test above can fail."""
    keys = {**SMOOTH, "optimizer": "adamw", "rule": "weights"}
    one, two = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2))
    assert relative_difference(two, one) > 1e-3


def test_float32_is_exact_to_rounding(data: Path, tmp_path: Path) -> None:
    keys = {**SMOOTH, "optimizer": "adamw"}
    one, two = (train(n, data, tmp_path / str(n), double=False, **keys) for n in (1, 2))
    assert relative_difference(two, one) <= 1e-6


PARTS = {
    "dropout": {"model": "smallnet"},
    "norms": {"model": "resnet20", "model_args": {"n": 1}, "optimizer": "adamw", "learning_rate": 0.01},
}


@pytest.mark.parametrize(
    "values", [PARTS["dropout"], pytest.param(PARTS["norms"], marks=pytest.mark.slow)], ids=PARTS
)
def test_parts_give_the_same_bits_for_any_number_of_trainers(
    data: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """float32, kinks and all: weights, momenta, statistics and what was measured in training."""
    keys = {"n_epochs": 2, "logical_ranks": 4, "learning_rate": 0.02, "ema_decay": 0.9, **values}
    results = {n: train(n, data, tmp_path / str(n), double=False, **keys) for n in (1, 2, 4)}
    records = {n: json.loads(newest(tmp_path / str(n)).with_suffix(".json").read_text()) for n in results}
    for n in (2, 4):
        assert_same(results[n], results[1])
        assert records[n]["val_record"] == records[1]["val_record"]
    without = train(2, data, tmp_path / "without", double=False, **{**keys, "logical_ranks": None})
    assert relative_difference(without, results[1]) > 0


@pytest.mark.slow
def test_parts_go_on_with_another_number_of_trainers(data: Path, tmp_path: Path) -> None:
    keys = {"logical_ranks": 4, "learning_rate": 0.02, "model": "smallnet", "double": False}
    whole = train(1, data, tmp_path / "1", n_epochs=2, **keys)
    train(4, data, tmp_path / "4", n_epochs=1, **keys)
    shutil.copytree(tmp_path / "4", tmp_path / "2")
    ours = train(2, data, tmp_path / "2", start=newest(tmp_path / "2"), n_epochs=2, **keys)
    assert_same(ours, whole)


@pytest.mark.slow
def test_local_with_every_step_is_weights(data: Path, tmp_path: Path) -> None:
    keys = {**SMOOTH, "optimizer": "adamw"}
    weights = train(2, data, tmp_path / "weights", rule="weights", **keys)
    for name, args in (("every", {"every": 1}), ("from", {"every": 3, "from_epoch": 2})):
        assert_same(train(2, data, tmp_path / name, rule="local", rule_args=args, **keys), weights)
    apart = train(2, data, tmp_path / "apart", rule="local", rule_args={"every": 3}, **keys)
    assert relative_difference(apart, weights) > 1e-3


SLOW = [pytest.param(rule, marks=pytest.mark.slow) for rule in ("weights", "local", "gossip")]


@pytest.mark.parametrize(
    "rule",
    ["gradients", *SLOW, *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("outer", "elastic"))],
)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(data: Path, tmp_path: Path, rule: str) -> None:
    """At an epoch's end; and every rule resumes from the checkpoint of every other, with other trainers."""
    args = {} if rule in ("weights", "gradients") else {"every": 2}
    keys = {**SMOOTH, "optimizer": "adamw", "rule": rule, "rule_args": args}
    whole = train(2, data, tmp_path / "whole", **keys)
    train(2, data, tmp_path / "half", **{**keys, "n_epochs": 1})
    start = newest(tmp_path / "half")
    for other in ("weights", "gradients", "local", "outer", "elastic", "gossip"):
        shutil.copytree(tmp_path / "half", tmp_path / other)
        n_trainers = 2 if other == rule else 3
        others = {**keys, "rule": other, "rule_args": {}} if other != rule else keys
        ours = train(n_trainers, data, tmp_path / other, start=start, **others)
        if other == rule:
            assert_same(ours, whole)


@pytest.mark.parametrize("rule", ["outer", pytest.param("gossip", marks=pytest.mark.slow)])
def test_a_whole_training_that_continues_elsewhere_has_the_tensors_of_its_rule(
    data: Path, tmp_path: Path, rule: str
) -> None:
    keys = {**SMOOTH, "rule": rule, "rule_args": {"every": 2}, "snapshot_freq": 1}
    whole = train(2, data, tmp_path / "whole", False, **keys)
    first = tmp_path / "whole" / "checkpoints" / "epoch_0001.safetensors"
    keys |= {"pretrained": str(first), "pretrained_part": "whole"}
    assert_same(train(2, data, tmp_path / "elsewhere", False, **keys), whole)
    keys["devices"] = ["cpu"] * 3
    config, replica = make_config(**keys), make_replica(data, **keys)
    notes = start_with(config, replica.model, replica.arena).notes
    said = "the checkpoint has 2 replicas of rule: gossip: all begin with their mean"
    assert (said in notes) == (rule == "gossip")


@pytest.mark.parametrize(
    "rule", ["gradients", "outer", *SLOW, pytest.param("elastic", marks=pytest.mark.slow)]
)
def test_a_run_that_was_stopped_in_a_round_ends_it_and_goes_on(data: Path, tmp_path: Path, rule: str) -> None:
    """In the first of 5 steps; with rules that synchronize every third, it stops after that."""
    every = {} if rule in ("weights", "gradients") else {"every": 3}
    keys = {**SMOOTH, "optimizer": "adamw", "rule": rule, "rule_args": every}
    whole = train(2, data, tmp_path / "whole", **keys)
    train(2, data, tmp_path / "broken", stopped=True, **keys)
    start = newest(tmp_path / "broken")
    assert start.stem == f"epoch_0001_at_{8 * every.get('every', 1)}"
    assert_same(train(2, data, tmp_path / "broken", start=start, **keys), whole)
