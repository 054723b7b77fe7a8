"""Training runs of several trainers on one host, without a launcher, and comparisons of their results."""

import multiprocessing
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import make_config
from safetensors.numpy import load_file
from small_networks import SmoothNet

from lockstep.comm.group import Group
from lockstep.comm.messages import Stop
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.launch.ranks import DEADLINE, run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.runs.plan import RunPlan
from train_funcs import Trainer


def make_trainer(
    rank: int,
    pipes: dict[int, Pipe],
    config: Config,
    place: Path,
    double: bool,
    start: Path | None = None,
) -> tuple[Trainer, Pipe]:
    """Return a trainer in this process and the launcher's end of its pipe.

    Args:
        start: The tensors of the checkpoint to resume from.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    sys.modules["models.smoothnet"] = types.SimpleNamespace(Model=SmoothNet)  # type: ignore[assignment]
    ours, launcher = multiprocessing.Pipe()
    control = Pipe(ours, "the launcher", DEADLINE)
    plan = RunPlan(config, place, start)
    trainer = Trainer(plan, Group.on_one_host(rank, pipes), control, StatusBoard.create())
    return trainer, Pipe(launcher, f"trainer {rank}", DEADLINE)


def relative_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Return the largest relative difference among weights, momenta and averages, each as one vector."""
    assert ours.keys() == theirs.keys()

    def all_of(kind: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([tensors[name].ravel() for name in tensors if name.startswith(kind)])

    kinds = sorted({name.partition("/")[0] for name in ours} - {"buffers"})
    pairs = [(all_of(kind, ours), all_of(kind, theirs)) for kind in kinds]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


EXACT = {
    "label_smoothing": 0.1,
    "ema_decay": 0.9,
    "learning_rate": 0.01,
    "model": "small_networks:TwoHeads",
}


FACTORS = {"rule": "gradients", "factors": True, "model": "small_networks:FullLayers"}
SMOOTH = {**EXACT, "learning_rate": 0.001, "n_epochs": 2}
Tensors = dict[str, np.ndarray]


def train_rank(
    rank: int,
    pipes: dict[int, Pipe],
    config: Config,
    place: Path,
    double: bool,
    start: Path | None,
    stopped: bool,
) -> Tensors:
    """Train to the end and return the arena's tensors.

    Args:
        stopped: Ask rank 1 to stop in the first step.
    """
    trainer, launcher = make_trainer(rank, pipes, config, place, double, start)
    if stopped and rank == 1:
        launcher.send(Stop())
    assert trainer.run() == stopped
    arena = trainer.program.arena.tensors
    return {name: tensor.numpy().copy() for name, tensor in arena.items()}


def train(
    n_trainers: int,
    data: Path,
    place: Path,
    double: bool = True,
    start: Path | None = None,
    stopped: bool = False,
    **values: Any,
) -> Tensors:
    """Train with 8 images per step, check that replicas are bitwise equal, return the last checkpoint."""
    (place / "checkpoints").mkdir(parents=True, exist_ok=True)
    fixed = {"data_folder": str(data), "para_load": False, "global_batch_size": 8, "shuffle_block": 3}
    config, _ = settle(make_config(devices=["cpu"] * n_trainers, **{**fixed, **values}))
    first, *others = run_ranks(train_rank, n_trainers, config, place, double, start, stopped)
    if values.get("rule") in ("elastic", "gossip"):
        same = np.array_equal(first["weights/fc.bias"], others[0]["weights/fc.bias"])
        assert same == (values["rule"] == "gossip" and n_trainers == 2)  # two always average
        return load_file(newest(place))
    for other in others:
        assert all(first[name].tobytes() == other[name].tobytes() for name in first)
    return load_file(newest(place))


def newest(place: Path) -> Path:
    """Return the tensors file of the newest checkpoint of a run folder."""
    return sorted((place / "checkpoints").glob("*.safetensors"))[-1]


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    """Assert that both have the same tensors, bit for bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


HARD = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.01},
    "adamw": {"optimizer": "adamw"},
    "lars": {"optimizer": "lars", "learning_rate": 0.5},
    "clipped": {"clip_norm": 0.1, "learning_rate": 0.01},
    "clipped lars": {"optimizer": "lars", "clip_norm": 0.1, "learning_rate": 0.5, "accumulate": 2},
    "accumulated adamw": {"optimizer": "adamw", "clip_norm": 0.5, "accumulate": 3},
}
