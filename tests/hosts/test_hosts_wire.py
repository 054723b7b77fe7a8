"""Sums between hosts in bfloat16: rounding, equal bits on all hosts, and the row that travels with a sum."""

import hashlib
import math
from pathlib import Path
from typing import Any

import over_hosts
import pytest
import torch
from conftest import make_config, make_folder
from over_hosts import Here, make_group
from training_runs import SMOOTH, assert_same, newest, relative_difference

from lockstep.comm.pipes import Pipe
from lockstep.hosts.all_reduce import BLOCK, N_NUMBERS, PIECE, RowTable, _round
from lockstep.hosts.network import HostNetwork
from lockstep.launch.ranks import run_ranks

N_HOSTS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_numbers_are_rounded_to_bfloat16() -> None:
    """Large and small ones, zeros and what is not a number; a short last part is followed by zeros."""
    values = torch.randn(4 * BLOCK, generator=generator()) * torch.tensor(
        [1e-20, 1.0, 1e20, 0.0]
    ).repeat_interleave(BLOCK)
    values[0], values[1], values[2] = math.inf, -math.inf, math.nan
    packed = torch.empty(2 * 5 * BLOCK, dtype=torch.uint8)
    _round(values, packed)
    rounded = packed.view(torch.bfloat16)
    assert torch.equal(rounded[3 : 4 * BLOCK], values[3:].bfloat16()) and (rounded[4 * BLOCK :] == 0).all()
    assert rounded[:2].tolist() == [math.inf, -math.inf] and math.isnan(rounded[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_survive_a_sum_bit_for_bit(dtype: torch.dtype) -> None:
    """Through a sum of float32, which could not hold them."""
    rows = [
        [1.0, 0.1, 7.0, 2.0**53 - 1, -math.inf, 5e-324, 1e-9],
        [0.0, math.pi, 1.0, -1e300, math.inf, -0.0, 2.0**32],
    ]
    assert len(rows[0]) == N_NUMBERS
    tables = [RowTable(host, 2).encode(row, torch.empty(0, dtype=dtype)) for host, row in enumerate(rows)]
    assert RowTable(0, 2).decode(tables[0] + tables[1]) == rows


@pytest.mark.slow
def test_rounded_runs_are_near_and_go_on(data: Path, tmp_path: Path) -> None:
    """Hosts are equal to the bit (checked by `train`), and a resumed run has the bits of the whole one."""
    keys: dict[str, Any] = {**SMOOTH, "double": False}
    exact = over_hosts.train(2, 1, data, tmp_path / "exact", **keys)
    keys["network_dtype"] = "bfloat16"
    whole = over_hosts.train(2, 1, data, tmp_path / "whole", **keys)
    assert 1e-5 < relative_difference(whole, exact) < 0.01
    over_hosts.train(2, 1, data, tmp_path / "half", **{**keys, "n_epochs": 1})
    start = newest(tmp_path / "half" / "host0")
    assert_same(over_hosts.train(2, 1, data, tmp_path / "half", start=start, **keys), whole)


def values_of(host: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=generator(host))


def sum_in_pieces(rank: int, pipes: dict[int, Pipe], here: Here, n: int) -> tuple[Any, ...]:
    """Return a sum's digest and relative error, all hosts' rows, and which gathered tensors are right."""
    config = make_config(
        network_dtype="bfloat16", n_hosts=N_HOSTS, host_rank=0, rendezvous="here:1", run_name="test"
    )
    world = make_group(rank, pipes, N_HOSTS).everywhere
    network = HostNetwork.join(world, here, config, torch.device("cpu"))
    ours = values_of(rank, n)
    gathered = [torch.equal(each, values_of(host, n)) for host, each in enumerate(network.gather(ours))]
    rows = network.sum_with_row([ours], [float(rank)] * N_NUMBERS, rounded=True)
    exact = torch.stack([values_of(host, n) for host in range(N_HOSTS)]).sum(0)
    error = float((ours - exact).norm() / exact.norm())
    return hashlib.sha256(ours.numpy().tobytes()).hexdigest(), error, rows, gathered


@pytest.mark.parametrize("n", [6 * PIECE + 100, pytest.param(100, marks=pytest.mark.slow)])
def test_parts_go_in_pieces_and_hosts_have_the_same_sum(n: int) -> None:
    """Three hosts: the last part ends before its last piece, and two have none of a hundred numbers."""
    _store, here = over_hosts.serve()
    found = run_ranks(sum_in_pieces, N_HOSTS, here, n)
    assert len({digest for digest, *_ in found}) == 1
    for _, error, rows, gathered in found:
        assert 1e-4 < error < 0.01
        assert rows == [[float(host)] * N_NUMBERS for host in range(N_HOSTS)] and all(gathered)
