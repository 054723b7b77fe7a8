"""Rules and what a network or a step can be: frozen and shared layers, bfloat16, many parts, AlexNet."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import training_runs
from conftest import make_config, make_folder
from safetensors.numpy import load_file
from torch import nn
from training_runs import HARD, SMOOTH, assert_same, newest, relative_difference, train

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.launch.ranks import run_ranks
from lockstep.optim.fused import FusedSGD
from lockstep.sync.local import LocalRule


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images, as in tests/sync/test_rules.py."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


class Tied(nn.Module):
    """A frozen convolution, a layer that is used twice, two that share a weight, and one that is not used."""

    input_size = 32
    input_scale = 1 / 64

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4).requires_grad_(False)
        self.wide, self.twice = nn.Linear(512, 24), nn.Linear(24, 24)
        self.once, self.unused = nn.Linear(24, 24), nn.Linear(5, 3)
        self.once.weight = self.twice.weight
        self.partly = nn.Linear(24, 24)
        self.partly.weight.requires_grad_(False)
        self.fc = nn.Linear(24, n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.wide(torch.tanh(self.conv(images)).flatten(1)))
        x = torch.tanh(self.partly(torch.tanh(self.twice(torch.tanh(self.twice(x))))))
        logits: torch.Tensor = self.fc(torch.tanh(self.once(x)))
        return logits


@pytest.mark.parametrize(
    "values", [HARD["adamw"], pytest.param(HARD["clipped lars"], marks=pytest.mark.slow)]
)
def test_frozen_and_shared_layers_are_exact(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**SMOOTH, "model": "test_rules_networks:Tied", "rule": "gradients", **values}
    one = train(1, data, tmp_path / "1", **keys)
    for n_trainers in (2, 3):
        several = train(n_trainers, data, tmp_path / str(n_trainers), **keys)
        assert relative_difference(several, one) <= 1e-12
    assert np.array_equal(
        one["weights/partly.weight"], load_file(newest(tmp_path / "3"))["weights/partly.weight"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_four_trainers_are_one(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """Four trainers; tests/sync/test_rules.py has two and three."""
    keys = {**SMOOTH, "rule": "gradients", **values}
    one, four = (train(n, data, tmp_path / str(n), **keys) for n in (1, 4))
    assert relative_difference(four, one) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_float32_is_exact_to_rounding(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**SMOOTH, "rule": "gradients", "double": False, **values}
    one = train(1, data, tmp_path / "1", **keys)
    for n_trainers in (2, 3, 4):
        several = train(n_trainers, data, tmp_path / str(n_trainers), **keys)
        assert relative_difference(several, one) <= 1e-6


@pytest.mark.slow
def test_bfloat16_by_gradients_is_bfloat16_by_weights(data: Path, tmp_path: Path) -> None:
    """The same products, averaged before the step or after it: weights of float32 differ by its rounding."""
    keys = {**SMOOTH, "double": False, "learning_rate": 0.01}
    weights, gradients = (
        train(2, data, tmp_path / rule, rule=rule, precision="bf16", **keys)
        for rule in ("weights", "gradients")
    )
    exact = train(2, data, tmp_path / "fp32", rule="gradients", **keys)
    assert relative_difference(gradients, weights) < 0.1 * relative_difference(gradients, exact)


@pytest.mark.slow
def test_eight_parts_give_the_same_bits_for_eight_trainers(data: Path, tmp_path: Path) -> None:
    """One image a part, and in the last step of an epoch none for some."""
    keys = {"model": "smallnet", "n_epochs": 2, "logical_ranks": 8, "learning_rate": 0.02, "double": False}
    one, two, eight = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2, 8))
    assert_same(two, one)
    assert_same(eight, one)


def train_alexnet(rank: int, pipes: dict[int, Pipe], config: Config, place: Path) -> dict[str, str]:
    """Digests of the arena, which is too large to be sent."""
    trainer, _keep_open = training_runs.make_trainer(rank, pipes, config, place, double=False)
    assert not trainer.run()
    return trainer.program.arena.digests()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parts_of_alexnet_give_the_same_bits(tmp_path: Path) -> None:
    """Two steps of 8 images; the checkpoint has the momenta, too."""
    pictures = make_folder(tmp_path / "set", n_train=16, n_val=2, size=227)
    keys: dict[str, Any] = {
        "model": "alexnet",
        "n_epochs": 1,
        "global_batch_size": 8,
        "logical_ranks": 4,
        "para_load": False,
    }
    found: dict[int, tuple[dict[str, str], dict[str, int]]] = {}
    for n_trainers in (1, 2, 4):
        place = tmp_path / str(n_trainers)
        (place / "checkpoints").mkdir(parents=True)
        config, _ = settle(make_config(devices=["cpu"] * n_trainers, data_folder=str(pictures), **keys))
        digests, *others = run_ranks(train_alexnet, n_trainers, config, place)
        assert all(other == digests for other in others)
        tensors = newest(place)
        assert any(name.startswith("momenta/") for name in load_file(tensors))
        sums = {name: hash(array.tobytes()) for name, array in load_file(tensors).items()}
        found[n_trainers] = digests, sums
        record = json.loads(tensors.with_suffix(".json").read_text())
        assert record["position"] == 16
        tensors.unlink()
    assert found[2] == found[1] and found[4] == found[1]


class CountingTransport:
    """Counts what it is asked for."""

    n_elements = 32

    def __init__(self) -> None:
        self.n_calls = 0

    def all_reduce(self, span: tuple[int, int], op: str, barrier: object) -> None:
        self.n_calls += 1

    def within(self) -> "CountingTransport":
        return self


class Barrier:
    def __call__(self, point: str) -> None:
        pass


def test_meetings_are_counted_by_steps_and_not_by_parameters() -> None:
    """An optimizer with 20 groups of parameters: every fourth of 12 steps, and the epoch's last, the 13th."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(40)]
    settings = {"lr": 0.1, "weight_decay": 0.0}
    groups = [{"params": parameters[number::20], **settings} for number in range(20)]
    optimizer, transport = FusedSGD(groups, momentum=0.0, nesterov=False), CountingTransport()
    arena = SimpleNamespace(spans_to_average=lambda: [(0, 120)])
    rule = LocalRule(transport, arena, {"every": 4, "from_epoch": 0})  # type: ignore[arg-type]
    met = []
    for step in range(1, 14):
        order = Order("train", 1, step, 8 * step - 8, 8 * step, 0, 8)
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        due = rule.is_due(order, 8 * 13)
        rule.update(optimizer, Barrier() if due else None)  # type: ignore[arg-type]
        met += [step] if due else []
    assert met == [4, 8, 12, 13] and transport.n_calls == 4


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["gradients", "local"])
def test_steps_are_counted_once_whatever_lies_in_how_many_shards(
    data: Path,
    tmp_path: Path,
    rule: str,
) -> None:
    """AdamW's count for each of ResNet-20's 59 parameters, some of them in two shards: 5 steps an epoch."""
    keys = {"model": "resnet20", "optimizer": "adamw", "rule": rule, "double": False, "n_epochs": 2}
    steps = train(2, data, tmp_path / rule, **keys)["steps"]
    assert len(steps) == 59 and steps.tolist() == [10.0] * len(steps)
