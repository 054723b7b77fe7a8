"""The proofs: N trainers are one trainer with N times the batch, and replicas are bitwise equal.

Everything runs in the Trainer itself, in real processes. Only the launcher is left out.
"""

import multiprocessing
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_config, make_folder

from lockstep.config import Config
from lockstep.peers import Peers
from lockstep.pipes import Pipe
from lockstep.plan import Plan
from lockstep.ranks import DEADLINE, run_ranks
from lockstep.status import StatusBoard
from models import smallnet
from train_funcs import Trainer


class SmoothNet(smallnet.Model):
    """smallnet with tanh for its rectifiers and means for its maxima."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images / 64
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.avg_pool2d(torch.tanh(conv(x)), 2)
        return self.fc5(self.dropout(torch.tanh(self.fc4(x.flatten(1)))))


def train_rank(
    rank: int, pipes: dict[int, Pipe], config: Config, place: Path, double: bool
) -> dict[str, np.ndarray]:
    """Trains to the end in this process; returns the arena's tensors."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    sys.modules["models.smoothnet"] = types.SimpleNamespace(Model=SmoothNet)  # type: ignore[assignment]
    launcher, _keep_open = multiprocessing.Pipe()
    plan = Plan(config, place, None)
    control = Pipe(launcher, "the launcher", DEADLINE)
    trainer = Trainer(plan, Peers(rank, pipes), None, control, StatusBoard.create())
    assert not trainer.run()
    return {name: tensor.numpy().copy() for name, tensor in trainer.replica.arena.tensors.items()}


def train_n(
    n_trainers: int, data: Path, place: Path, double: bool, **values: object
) -> list[dict[str, np.ndarray]]:
    (place / "checkpoints").mkdir(parents=True)
    fixed = {"data_folder": str(data), "para_load": False, "batch_size": 8 // n_trainers, "shuffle_block": 3}
    config = make_config(devices=["cpu"] * n_trainers, **fixed, **values)
    return run_ranks(train_rank, n_trainers, config, place, double)


def relative_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The larger of that of the weights and that of the momenta, each in the norm of all together."""
    assert ours.keys() == theirs.keys()

    def all_of(kind: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([tensors[name].ravel() for name in tensors if name.startswith(kind)])

    pairs = [(all_of(kind, ours), all_of(kind, theirs)) for kind in ("weights", "momenta")]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """85 pictures: 11 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=85, n_val=9)


@pytest.mark.parametrize(
    ("model", "double", "bound"),
    [("smallnet", True, 1e-10), ("smoothnet", False, 1e-5)],
    ids=["float64", "float32"],
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


def test_dropout_crops_and_mirrors_are_the_same_for_any_n(data: Path, tmp_path: Path) -> None:
    values = {"n_epochs": 2, "learning_rate": 0.002, "use_nesterov_momentum": True}
    one = train_n(1, data, tmp_path / "1", True, **values)[0]
    two = train_n(2, data, tmp_path / "2", True, **values)[0]
    assert relative_difference(two, one) <= 1e-10


@pytest.mark.parametrize("n_trainers", [2, 3, 4])
def test_replicas_are_bitwise_equal(data: Path, tmp_path: Path, n_trainers: int) -> None:
    first, *others = train_n(n_trainers, data, tmp_path / "r", False, n_epochs=2)
    for other in others:
        assert all(first[name].tobytes() == other[name].tobytes() for name in first)


def test_more_trainers_than_pictures_in_the_last_minibatch(tmp_path: Path) -> None:
    """17 pictures and 4 trainers of 2: the third minibatch has one picture, three trainers have none."""
    data = make_folder(tmp_path / "set", n_train=17, n_val=3)
    values = {"n_epochs": 2, "learning_rate": 0.002, "model_args": {"dropout": 0.0}}
    one = train_n(1, data, tmp_path / "1", True, **values)[0]
    four = train_n(4, data, tmp_path / "4", True, **values)
    assert relative_difference(four[3], one) <= 1e-10
