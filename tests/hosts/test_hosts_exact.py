"""Over several hosts training is what it is on one, rule by rule: in real processes, over sockets."""

import os
import time
from pathlib import Path
from typing import Any

import over_hosts
import pytest
import torch
import training_runs
from conftest import make_config, make_folder
from limits import limit
from over_hosts import Here, make_group
from training_runs import FACTORS, SMOOTH, Tensors, assert_same, newest, relative_difference

from lockstep.comm.pipes import Pipe
from lockstep.errors import PeerProblem
from lockstep.hosts.all_reduce import PIECE
from lockstep.hosts.network import HostNetwork
from lockstep.launch.ranks import try_ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def on_one(n_trainers: int, data: Path, place: Path, **keys: Any) -> Tensors:
    return training_runs.train(n_trainers, data, place, **keys)


HARD = {
    "clipped lars": {"optimizer": "lars", "clip_norm": 0.1, "learning_rate": 0.5, "accumulate": 2},
    "sgd by weights": {"rule": "weights", "learning_rate": 0.01},
}


@pytest.mark.parametrize(
    "values",
    [pytest.param(HARD[k], id=k, marks=[] if k == "clipped lars" else [pytest.mark.slow]) for k in HARD],
)
def test_hosts_are_as_exact_as_trainers_of_one(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**SMOOTH, "rule": "gradients", **values}
    one = on_one(4, data, tmp_path / "1", **keys)
    two = over_hosts.train(2, 2, data, tmp_path / "2", **keys)
    assert relative_difference(two, one) <= 1e-12


@pytest.mark.parametrize(
    ("places", "factors"),
    [
        pytest.param((2, 1), True, id="2x1 factors"),
        pytest.param((2, 2), False, id="2x2", marks=pytest.mark.slow),
        pytest.param((2, 2), True, id="2x2 factors", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_sums_that_begin_early_have_the_same_bits(
    data: Path, tmp_path: Path, places: tuple[int, int], factors: bool
) -> None:
    """Several buckets; in the last step of an epoch, of one image, trainers have none."""
    keys = {**SMOOTH, **FACTORS, "factors": factors, "global_batch_size": 4, "n_epochs": 1, "bucket": 1 << 13}
    early = over_hosts.train(*places, data, tmp_path / "early", **keys)
    late = over_hosts.train(*places, data, tmp_path / "late", **keys, overlap=False)
    assert_same(early, late)
    one = on_one(2, data, tmp_path / "one", **{k: keys[k] for k in keys if k != "bucket"})
    assert relative_difference(early, one) <= 1e-12


OTHERS: dict[str, dict[str, Any]] = {
    "accumulated adamw": {"optimizer": "adamw", "clip_norm": 0.5, "accumulate": 3},
    "factors": {**FACTORS, "global_batch_size": 4, "optimizer": "adamw"},
}


@pytest.mark.slow
@pytest.mark.parametrize("places", [(2, 2), (3, 1)], ids=["2x2", "3x1"])
@pytest.mark.parametrize("values", OTHERS.values(), ids=OTHERS)
def test_they_are_with_uneven_hosts_and_factors(
    data: Path, tmp_path: Path, values: dict[str, Any], places: tuple[int, int]
) -> None:
    """Three hosts cut shares where two don't."""
    keys = {**SMOOTH, "rule": "gradients", **values}
    one = on_one(places[0] * places[1], data, tmp_path / "1", **keys)
    assert relative_difference(over_hosts.train(*places, data, tmp_path / "2", **keys), one) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("places", [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_parts_have_the_same_bits_over_hosts(data: Path, tmp_path: Path, places: tuple[int, int]) -> None:
    keys = {"n_epochs": 2, "logical_ranks": 4, "learning_rate": 0.02, "ema_decay": 0.9, "double": False}
    one = on_one(1, data, tmp_path / "1", **keys)
    assert_same(over_hosts.train(*places, data, tmp_path / "2", **keys), one)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["local", "outer"])
def test_hosts_that_step_alone(data: Path, tmp_path: Path, rule: str) -> None:
    """Every step of a host of two is exact, so two such hosts are two trainers of twice the batch."""
    args = {"rule": rule, "rule_args": {"every": 3}}
    keys = {**SMOOTH, **args}
    one = on_one(2, data, tmp_path / "1", **keys)
    for n_local in (1, 2):
        place = tmp_path / f"two{n_local}"
        assert relative_difference(over_hosts.train(2, n_local, data, place, **keys), one) <= 1e-12


RULES = {"gradients": {}, "local": {"rule_args": {"every": 3}}}


@pytest.mark.parametrize("rule", ["gradients", pytest.param("local", marks=pytest.mark.slow)])
def test_a_wish_to_stop_reaches_all_hosts_and_the_run_goes_on_as_it_was(
    data: Path, tmp_path: Path, rule: str
) -> None:
    """The last host's trainer is asked in the first step; by `local` it stops when hosts synchronize."""
    keys = {**SMOOTH, "rule": rule, **RULES[rule]}
    whole = over_hosts.train(2, 1, data, tmp_path / "whole", **keys)
    over_hosts.train(2, 1, data, tmp_path / "broken", stopped=True, **keys)
    start = newest(tmp_path / "broken" / "host0")
    assert start.stem == f"epoch_0001_at_{24 if rule == 'local' else 8}"
    assert_same(over_hosts.train(2, 1, data, tmp_path / "broken", start=start, **keys), whole)


def sum_with_one_that_goes(rank: int, pipes: dict[int, Pipe], here: Here, how: str, wire: str) -> str:
    """Sum while rank 1 exits or does not arrive; return the others' errors and the seconds."""
    group = make_group(rank, pipes, len(pipes) + 1)
    keys = {"n_hosts": 2, "host_rank": 0, "rendezvous": "here:1", "run_name": "test", "network_dtype": wire}
    config = make_config(devices=["cpu"], timeout=2.0, **keys)
    network = HostNetwork.join(group.everywhere, here, config, torch.device("cpu"))
    network.sum([torch.ones(3)])
    if rank == 1:
        if how == "dies":
            os._exit(0)
        pipes[0].receive(str, "the end")
        return ""
    begin = time.monotonic()
    with pytest.raises(PeerProblem) as caught:
        network.sum([torch.ones(6 * PIECE)], rounded=True)  # three pieces of each part, where it is rounded
    assert time.monotonic() - begin < limit(5)
    if how == "stands still":
        pipes[1].send("end")
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["dies", pytest.param("stands still", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_whoever_is_missing_in_a_sum_is_named(how: str, wire: str) -> None:
    _store, here = over_hosts.serve()
    received, other = try_ranks(sum_with_one_that_goes, 2, here, how, wire, seconds=limit(60))
    assert not received.problem, received.traceback
    words = (
        "PeerLost: trainer 0 of host 1 has left" if how == "dies" else "waited 2 s for trainer 0 of host 1"
    )
    assert words in received.value
    assert ("exit code 0" in other.problem) == (how == "dies")
