"""Gradients that are summed during backward: the same bits with and without overlap, on CPUs and GPUs."""

from pathlib import Path
from typing import Any

import pytest
import simulated
from conftest import make_config, make_folder
from safetensors.numpy import load_file
from simulated import Simulation
from training_runs import EXACT, FACTORS, Tensors, assert_same, newest, train_rank

from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.exchange import proof
from lockstep.exchange.p2p import PeerTransport
from lockstep.launch.ranks import run_ranks
from lockstep.network import gradients
from lockstep.network.gradients import Gradients

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
KEYS = {
    **EXACT,
    **FACTORS,
    "factors": False,
    "model_args": {"norm": True},
    "learning_rate": 0.001,
    "n_epochs": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 images: 6 steps of 4, the last with one, which leaves trainers without."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=21, n_val=9)


def train_in_buckets(
    rank: int, pipes: dict[int, Pipe], simulation: Simulation | None, config: Config, place: Path
) -> tuple[Tensors, list[Any]]:
    """Train; return also the numbers of buckets in the order of their marks, and 'end' of backward."""
    if simulation:
        simulated.use(simulation)
        proof.PROOF_BYTES = 4 << 20
    gradients._BUCKET = 1 << 13
    received: list[Any] = []
    mark, complete = PeerTransport.mark, Gradients.complete
    PeerTransport.mark = lambda self, number: (received.append(number), mark(self, number))[1]  # type: ignore
    Gradients.complete = lambda self: (complete(self), received.append("end"))[0]  # type: ignore
    return train_rank(rank, pipes, config, place, False, None, False), received


def train(
    data: Path, place: Path, n_trainers: int = 2, simulation: Simulation | None = None, **keys: Any
) -> tuple[Tensors, list[list[Any]]]:
    """Return the last checkpoint, and the marks of each trainer."""
    (place / "checkpoints").mkdir(parents=True)
    devices = ["cuda:0" if simulation else "cpu"] * n_trainers
    fixed = {"devices": devices, "data_folder": str(data), "para_load": False, "global_batch_size": 4}
    config, _ = settle(make_config(**{**fixed, **KEYS, **keys}))
    results = run_ranks(train_in_buckets, n_trainers, simulation, config, place)
    return load_file(newest(place)), [received for _, received in results]


def test_overlap_changes_no_bit_on_cpus(data: Path, tmp_path: Path) -> None:
    keys = {"optimizer": "lars", "clip_norm": 0.1}
    (ours, received), (theirs, _) = (
        train(data, tmp_path / str(overlap), overlap=overlap, **keys) for overlap in (True, False)
    )
    assert_same(ours, theirs)
    assert {*received[0]} == {"end"}


CASES = {
    "sgd": {},
    "accumulated adamw": {"optimizer": "adamw", "accumulate": 2},
    "clipped lars by factors": {"optimizer": "lars", "clip_norm": 0.1, "factors": True},
}


@pytest.mark.parametrize(
    "keys", [CASES["sgd"], *(pytest.param(keys, marks=pytest.mark.slow) for keys in CASES.values())]
)
def test_gpus_sum_early_and_have_the_bits_of_cpus(
    data: Path, tmp_path: Path, simulation: Simulation, keys: dict[str, Any]
) -> None:
    """Buckets are full before backward has ended, the last layers' first; or none is with overlap: false."""
    on_cpus, _ = train(data, tmp_path / "cpus", 3, **keys)
    simulation = simulation.set(delay=500)
    early, received = train(data, tmp_path / "early", 3, simulation, **keys)
    assert_same(early, on_cpus)
    first = received[0][: received[0].index("end")]
    assert len(set(first)) > 2 and first[0] == 0
    late, received = train(data, tmp_path / "late", 3, simulation, **{**keys, "overlap": False})
    assert_same(late, on_cpus)
    assert {*received[0]} == {"end"}


@pytest.mark.slow
@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_staged_exchange_sums_after_backward(
    data: Path, tmp_path: Path, simulation: Simulation, keys: dict[str, Any]
) -> None:
    on_cpus, _ = train(data, tmp_path / "cpus", **keys)
    staged, received = train(
        data, tmp_path / "staged", simulation=simulation.set(delay=500), exchange="staged", **keys
    )
    assert_same(staged, on_cpus)
    assert {*received[0]} == {"end"}
