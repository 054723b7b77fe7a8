"""Frozen parameters, rates by pattern and by stage: in a replica, and in runs of several trainers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_config, make_folder
from safetensors.numpy import load_file
from small_replicas import make_batch, make_replica, recorder, update
from torch import nn
from training_runs import Tensors, assert_same, newest, relative_difference, train

from lockstep.errors import UserError
from lockstep.network.build import build_model
from lockstep.network.gradients import _buckets
from lockstep.network.stages import Frozen, rate_scales

NORMED = {"model_args": {"norm": True}}
FROZEN = {"model": "small_networks:TwoHeads", **NORMED, "freeze": ["conv.*", "norm.*"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def initial_values() -> Tensors:
    model = build_model(make_config(model="small_networks:TwoHeads", **NORMED), 7)
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "values",
    [
        {"rule": "weights"},
        {"rule": "gradients", "optimizer": "adamw"},
        pytest.param({"rule": "local", "rule_args": {"every": 2}}, marks=pytest.mark.slow),
    ],
    ids=["weights", "gradients", "local"],
)
def test_frozen_tensors_keep_their_bits(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """Three trainers, whose mean of equal numbers may be rounded, and one of them without images."""
    keys = {
        **FROZEN,
        "learning_rate": 0.01,
        "n_epochs": 2,
        "ema_decay": 0.9,
        "global_batch_size": 18,
        **values,
    }
    trained = train(3, data, tmp_path, double=False, **keys)
    first = initial_values()
    for name in ("conv.weight", "norm.weight", "norm.bias"):
        assert trained[f"weights/{name}"].tobytes() == first[name].tobytes()
        assert not [key for key in trained if key.endswith(name) and not key.startswith("weights/")]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert np.array_equal(trained[f"buffers/norm.{name}"], first[f"norm.{name}"])
    assert not np.array_equal(trained["weights/fc.weight"], first["fc.weight"])


def test_without_freeze_they_move(data: Path, tmp_path: Path) -> None:
    """The negative control of the test above."""
    trained = train(1, data, tmp_path, double=False, **{**FROZEN, "freeze": [], "n_epochs": 1})
    assert not np.array_equal(trained["weights/conv.weight"], initial_values()["conv.weight"])
    assert not np.array_equal(trained["buffers/norm.running_mean"], initial_values()["norm.running_mean"])


def test_the_rest_trains_exactly_on_any_number_of_trainers(data: Path, tmp_path: Path) -> None:
    """With frozen statistics even a network with batch normalization is exact; and a resumed run, too."""
    keys = {**FROZEN, "learning_rate": 0.001, "n_epochs": 2, "rule": "gradients", "optimizer": "adamw"}
    keys |= {"layer_decay": 0.5, "learning_rates": {"fc.*": 3}, "clip_norm": 0.5}
    one, three = (train(n, data, tmp_path / str(n), **keys) for n in (1, 3))
    assert relative_difference(three, one) <= 1e-12
    train(3, data, tmp_path / "broken", stopped=True, **keys)
    assert_same(train(3, data, tmp_path / "broken", start=newest(tmp_path / "broken"), **keys), three)


@pytest.mark.parametrize("norm", ["module", "function", "script"])
def test_a_group_norm_behind_frozen_layers_takes_the_step_that_it_takes_behind_trained_ones(
    norm: str, data: Path, tmp_path: Path
) -> None:
    """Without the gradient of its images, torch's backward pass kills the trainers by SIGSEGV."""
    network: dict[str, Any] = {"model": "small_networks:GroupNormed", "model_args": {"norm": norm}}
    keys = {**network, "n_epochs": 1, "global_batch_size": 38}  # a single step
    frozen, free = (train(2, data, tmp_path / str(len(f)), freeze=f, **keys) for f in (["conv.*"], []))
    for name in ("norm.weight", "norm.bias", "fc.weight"):
        assert np.allclose(frozen[f"weights/{name}"], free[f"weights/{name}"], rtol=1e-12, atol=0)
    assert not np.array_equal(frozen["weights/conv.weight"], free["weights/conv.weight"])


@pytest.mark.slow
def test_parts_have_the_same_bits(data: Path, tmp_path: Path) -> None:
    keys = {
        **FROZEN,
        "learning_rate": 0.01,
        "n_epochs": 1,
        "logical_ranks": 4,
        "layer_decay": 0.5,
        "double": False,
    }
    one, four = (train(n, data, tmp_path / str(n), **keys) for n in (1, 4))
    assert_same(four, one)


def test_frozen_weights_take_no_part_in_an_exchange(shared_folder: Path) -> None:
    whole = make_replica(shared_folder)
    replica = make_replica(shared_folder, freeze=["conv.*"])
    n_conv = 112 + 16  # 108 weights and 4 biases, each on a multiple of 16
    assert replica.arena.n_frozen == n_conv
    assert len(whole.arena.flat) - len(replica.arena.flat) == n_conv  # the momenta
    replica.forward_backward(make_batch(0), 6, 0, recorder())
    assert replica.model.conv.weight.grad is None and replica.model.fc.weight.grad is not None


def test_rates_are_those_of_torchs_groups(shared_folder: Path) -> None:
    values = {"learning_rate": 0.1, "momentum": 0.0, "use_momentum": False, "weight_decay": 0.0}
    args = {"optimizer_args": {"bias_rate": 1.0}}
    plain, scaled = (
        make_replica(shared_folder, **values, **args, learning_rates=each)
        for each in ({}, {"conv.*": 0.25, "*.bias": 0.0})
    )
    begin = {name: value.detach().clone() for name, value in plain.model.named_parameters()}
    for replica in (plain, scaled):
        update(replica, 0)
    ours = dict(scaled.model.named_parameters())
    for name, value in plain.model.named_parameters():
        factor = 0.0 if name.endswith("bias") else 0.25 if name.startswith("conv") else 1.0
        assert torch.allclose(ours[name] - begin[name], factor * (value - begin[name]), atol=1e-7), name


def test_layer_decay_falls_from_the_last_stage_to_the_first() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Linear(4, 2)
    )
    config = make_config(layer_decay=0.5, learning_rates={"3.bias": 2})
    expected = {"0.weight": 0.25, "1.weight": 0.25, "2.0.weight": 0.5, "3.weight": 1.0, "3.bias": 2.0}
    assert rate_scales(model, config).items() >= expected.items()


def test_norms_without_parameters_go_by_their_statistics() -> None:
    stage = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    model = nn.Sequential(stage, nn.BatchNorm1d(2))
    assert Frozen(model, ["0.0.*"]).buffers == []
    assert Frozen(model, ["1.weight"]).buffers == []  # its bias is trained
    frozen = Frozen(model, ["0.*"])
    assert frozen.buffers == [
        f"0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    frozen.begin_training(model)
    assert model[1].training and stage.training and not stage[1].training
    with pytest.raises(UserError, match="nothing is left to train"):
        Frozen(model, ["*"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"freeze": ["conw.*"]}, "freeze: no parameter of the network matches 'conw.*'"),
        ({"learning_rates": {"fx.weight": 2}}, "matches 'fx.weight' \\(did you mean 'fc.weight'\\?\\)"),
        ({"freeze": ["conv.*"], "learning_rates": {"conv.*": 2}}, "no trained parameter of the network"),
    ],
)
def test_patterns_that_match_nothing_are_refused(
    shared_folder: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_replica(shared_folder, **values)


def test_fine_tuning_begins_with_others_weights_and_a_new_head(data: Path, tmp_path: Path) -> None:
    """A file with another number of classes, and one without a head, both fit."""
    torch.manual_seed(1)
    other = build_model(make_config(model="small_networks:TwoHeads", seed=5, **NORMED), 12)
    whole = {name: value.contiguous() for name, value in other.state_dict().items()}
    torch.save(whole, tmp_path / "whole.pth")
    heads = ("fc.", "aux.")
    torch.save(
        {name: value for name, value in whole.items() if not name.startswith(heads)}, tmp_path / "body.pth"
    )
    for file in ("whole.pth", "body.pth"):
        keys = {**FROZEN, "pretrained": str(tmp_path / file), "new_head": True, "n_epochs": 1}
        train(1, data, tmp_path / file.partition(".")[0], double=False, **keys)
        trained = load_file(newest(tmp_path / file.partition(".")[0]))
        assert np.array_equal(trained["weights/conv.weight"], whole["conv.weight"].numpy())
        assert trained["weights/fc.weight"].shape == (7, 512)


UNFREEZING = {**FROZEN, "unfreeze_epoch": 2, "n_epochs": 3, "learning_rate": 0.01, "global_batch_size": 18}
PLACES = ("weights/conv.weight", "weights/norm.bias", "buffers/norm.running_mean")


def checkpoint_of(place: Path, epoch: int) -> Tensors:
    return load_file(place / "checkpoints" / f"epoch_{epoch:04d}.safetensors")


@pytest.mark.parametrize(
    "values",
    [
        {"rule": "weights"},
        {"rule": "gradients", "optimizer": "adamw"},
        {"rule": "local", "rule_args": {"every": 2}},
        {"rule": "gradients", "logical_ranks": 3},
    ],
    ids=["weights", "gradients", "local", "logical_ranks"],
)
def test_unfrozen_tensors_keep_their_bits_until_then(
    data: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """Three trainers, whose mean of equal numbers may be rounded; the optimizer state is zero until then."""
    keys = {**UNFREEZING, "ema_decay": 0.9, "snapshot_freq": 1, **values}
    last = train(3, data, tmp_path, double=False, **keys)
    before, first = checkpoint_of(tmp_path, 1), initial_values()
    for name, value in before.items():
        kind, _, key = name.partition("/")
        if key.startswith(("conv.", "norm.")):
            expected = first[key] if kind in ("weights", "buffers", "ema") else np.zeros_like(value)
            assert value.tobytes() == expected.tobytes(), name
    assert before["weights/fc.weight"].tobytes() != first["fc.weight"].tobytes()
    for name in (*PLACES, "ema/conv.weight", "ema/norm.running_var"):
        assert not np.array_equal(last[name], before[name]), name


@pytest.mark.slow
def test_a_run_until_unfreezing_is_one_with_freeze_and_then_one_without(data: Path, tmp_path: Path) -> None:
    """The reference: two runs, the second of which has the first one's weights and no momentum."""
    keys = {**UNFREEZING, "use_momentum": False, "lr_policy": "step", "lr_step": []}
    both = train(2, data, tmp_path / "both", **keys)
    frozen = {**keys, "unfreeze_epoch": None, "n_epochs": 1}
    train(2, data, tmp_path / "first", **frozen)
    start = newest(tmp_path / "first")
    unfrozen = {**keys, "unfreeze_epoch": None, "freeze": []}
    second = train(2, data, tmp_path / "second", start=start, **unfrozen)
    assert_same(both, second)


@pytest.mark.parametrize("rule", ["weights", "gradients"])
@pytest.mark.parametrize("epoch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_resumed_before_at_and_after_unfreezing_has_the_same_bits(
    data: Path, tmp_path: Path, rule: str, epoch: int
) -> None:
    """A checkpoint of epoch 1 resumes at the unfreezing, one of epoch 2 after it."""
    keys = {**UNFREEZING, "rule": rule, "optimizer": "adamw", "ema_decay": 0.9, "snapshot_freq": 1}
    whole = train(2, data, tmp_path / "whole", **keys)
    start = tmp_path / "whole" / "checkpoints" / f"epoch_{epoch:04d}.safetensors"
    assert_same(train(2, data, tmp_path / "resumed", start=start, **keys), whole)
    if epoch == 1:
        train(2, data, tmp_path / "stopped", stopped=True, **keys)  # after the first step
        assert_same(train(2, data, tmp_path / "stopped", start=newest(tmp_path / "stopped"), **keys), whole)


@pytest.mark.parametrize(
    "values", [{}, {"optimizer": "adamw", "clip_norm": 0.5}], ids=["sgd", "clipped adamw"]
)
def test_unfreezing_has_the_same_bits_on_any_number_of_trainers(
    data: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    keys = {**UNFREEZING, "logical_ranks": 4, "double": False, "ema_decay": 0.9, **values}
    one, two, four = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2, 4))
    assert_same(two, one)
    assert_same(four, one)
    never = train(1, data, tmp_path / "never", **{**keys, "unfreeze_epoch": None})
    assert never["weights/conv.weight"].tobytes() != one["weights/conv.weight"].tobytes()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_a_stage_that_is_frozen_whole_may_have_a_rate_of_its_own(shared_folder: Path, optimizer: str) -> None:
    """A group of the optimizer then has no gradient before `unfreeze_epoch`."""
    keys = {"optimizer": optimizer, "freeze": ["conv.*"], "unfreeze_epoch": 2, "layer_decay": 0.5}
    replica = make_replica(shared_folder, **keys)
    conv = dict(replica.model.named_parameters())["conv.weight"]
    first = conv.detach().clone()
    update(replica, 0)
    assert torch.equal(conv, first)
    replica.begin_epoch(2, 90, 0.1)
    update(replica, 1)
    assert not torch.equal(conv, first)


def test_a_bucket_begins_where_frozen_weights_end(shared_folder: Path) -> None:
    """Also if the first weight behind them belongs to a network that never trains it."""
    replica = make_replica(shared_folder, freeze=["conv.*"], unfreeze_epoch=2)
    n_conv = replica.arena.n_frozen
    assert n_conv == 112 + 16
    assert replica.arena.spans_to_average()[0][0] == n_conv
    assert _buckets([(160, 200)], (0, 320), n_conv) == [(128, 320), (0, 128)]
    replica.begin_epoch(2, 90, 0.1)
    assert replica.arena.n_frozen == 0
    assert replica.arena.spans_to_average() == [(0, len(replica.arena.flat))]


def test_a_parameter_that_the_network_unfreezes_itself_is_noted_once(shared_folder: Path) -> None:
    """No optimizer has it, so it would silently stay as it is."""
    replica = make_replica(shared_folder, freeze=["conv.*"])
    warnings: list[str] = []
    replica.warn = warnings.append
    replica.begin_validation()
    assert not warnings
    replica.model.conv.requires_grad_(True)
    for _ in range(2):
        replica.begin_validation()
    assert len(warnings) == 1 and warnings[0].startswith("the model's conv.weight has requires_grad now")
