"""Rules: what each promises, in real processes: exactness, equal bits, checkpoints of one read by another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_folder
from safetensors.numpy import load_file
from test_equivalence import EXACT, relative_difference, train_n

SMOOTH = {**EXACT, "learning_rate": 0.001, "n_epochs": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 pictures: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def train(
    n_trainers: int, data: Path, place: Path, double: bool = True, **values: Any
) -> dict[str, np.ndarray]:
    """The last checkpoint, when it is certain that the replicas are bitwise equal."""
    first, *others = train_n(n_trainers, data, place, double, **values)
    for other in others:
        assert all(first[name].tobytes() == other[name].tobytes() for name in first)
    return load_file(sorted((place / "checkpoints").glob("*.safetensors"))[-1])


HARD = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.01},
    "adamw": {"optimizer": "adamw"},
    "lars": {"optimizer": "lars", "learning_rate": 0.5},
    "clipped": {"clip_norm": 0.1, "learning_rate": 0.01},
    "clipped lars": {"optimizer": "lars", "clip_norm": 0.1, "learning_rate": 0.5, "accumulate": 2},
    "accumulated adamw": {"optimizer": "adamw", "clip_norm": 0.5, "accumulate": 3},
}


@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_gradients_are_exact_for_every_optimizer(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**SMOOTH, "rule": "gradients", **values}
    one = train(1, data, tmp_path / "1", **keys)
    for n_trainers in (2, 4):
        several = train(n_trainers, data, tmp_path / str(n_trainers), **keys)
        assert relative_difference(several, one) <= 1e-12
