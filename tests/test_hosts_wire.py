"""What goes between hosts in fewer bits: how it is rounded, that hosts stay equal, and what rides with it."""

import hashlib
import math
from pathlib import Path
from typing import Any

import over_hosts
import pytest
import torch
from conftest import make_config, make_folder
from over_hosts import Here, make_group
from test_equivalence import relative_difference
from test_rules import SMOOTH, assert_same, newest

from lockstep.comm.pipes import Pipe
from lockstep.hosts.network import Network
from lockstep.hosts.riders import N_NUMBERS, Riders
from lockstep.hosts.sums import PIECE
from lockstep.hosts.wire import BLOCK, BFloat16, Int8, Wire
from lockstep.launch.ranks import run_ranks

N_HOSTS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 pictures: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pack(wire: Wire, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    packed = torch.empty(wire.n_bytes(len(values)), dtype=torch.uint8)
    wire.pack(values, packed, generator(seed))
    return packed


@pytest.mark.parametrize("wire", [BFloat16(), Int8()], ids=["bfloat16", "int8"])
def test_numbers_come_back_rounded(wire: Wire) -> None:
    """Large and small blocks, zeros and what is not a number; in as many bytes as are said."""
    values = torch.randn(4 * BLOCK, generator=generator()) * torch.tensor(
        [1e-20, 1.0, 1e20, 0.0]
    ).repeat_interleave(BLOCK)
    packed = pack(wire, values)
    assert packed.dtype == torch.uint8 and 8 * len(packed) == wire.bits * len(values)
    error = (wire.unpack(packed) - values).view(4, BLOCK).norm(dim=1)
    assert (error <= 0.02 * values.view(4, BLOCK).norm(dim=1)).all()
    for bad in (math.inf, -math.inf, math.nan):
        values[BLOCK] = bad
        assert not wire.unpack(pack(wire, values)).isfinite().all()


def test_int8_rounds_at_random_with_the_mean_right_and_again_alike() -> None:
    values = torch.linspace(-1, 1, BLOCK)
    wire = Int8()
    many = torch.stack([wire.unpack(pack(wire, values, seed)) for seed in range(2000)])
    assert (many.mean(0) - values).abs().max() < 1e-3  # a step is 8e-3, the deviation of a mean below 9e-5
    assert many.std(0).max() > 3e-3
    again = wire.unpack(pack(wire, values, 3))
    assert torch.equal(again, many[3]) and not torch.equal(many[3], many[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_that_ride_arrive_as_they_are(dtype: torch.dtype) -> None:
    """Through a sum of float32, which could not hold them."""
    rows = [[1.0, 0.1, 7.0, 2.0**53 - 1, -math.inf, 5e-324], [0.0, math.pi, 1.0, -1e300, math.inf, -0.0]]
    assert len(rows[0]) == N_NUMBERS
    tables = [Riders(host, 2).encode(row, torch.empty(0, dtype=dtype)) for host, row in enumerate(rows)]
    assert Riders(0, 2).decode(tables[0] + tables[1]) == rows


@pytest.mark.parametrize(
    ("wire", "bound"), [("int8", 0.03), pytest.param("bfloat16", 0.01, marks=pytest.mark.slow)]
)
def test_rounded_runs_are_near_and_go_on(data: Path, tmp_path: Path, wire: str, bound: float) -> None:
    """Hosts are equal to the bit (train sees to that); where a run goes on, it rounds as it would have."""
    keys: dict[str, Any] = {**SMOOTH, "double": False}
    exact = over_hosts.train(2, 1, data, tmp_path / "exact", **keys)
    keys["wire"] = wire
    whole = over_hosts.train(2, 1, data, tmp_path / "whole", **keys)
    assert 1e-5 < relative_difference(whole, exact) < bound
    over_hosts.train(2, 1, data, tmp_path / "half", **{**keys, "n_epochs": 1})
    start = newest(tmp_path / "half" / "host0")
    assert_same(over_hosts.train(2, 1, data, tmp_path / "half", start=start, **keys), whole)


def values_of(host: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=generator(host))


def sum_in_pieces(rank: int, pipes: dict[int, Pipe], here: Here, wire: str, n: int) -> tuple[Any, ...]:
    """The bytes and relative error of a sum of n numbers, rows that went with it; and of what is gathered."""
    config = make_config(wire=wire, hosts=N_HOSTS, host=0, meeting_point="here:1", run_name="test")
    world = make_group(rank, pipes, N_HOSTS).everywhere
    network = Network.join(world, here, config, torch.device("cpu"))
    ours = values_of(rank, n)
    gathered = [torch.equal(each, values_of(host, n)) for host, each in enumerate(network.gather(ours))]
    network.rider = [float(rank)] * N_NUMBERS
    network.sum([ours], rounded=True)
    exact = torch.stack([values_of(host, n) for host in range(N_HOSTS)]).sum(0)
    error = float((ours - exact).norm() / exact.norm())
    return hashlib.sha256(ours.numpy().tobytes()).hexdigest(), error, network.rows, gathered


@pytest.mark.parametrize("wire", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [6 * PIECE + 100, pytest.param(100, marks=pytest.mark.slow)])
def test_parts_go_in_pieces_and_hosts_have_the_same_sum(wire: str, n: int) -> None:
    """Three hosts: the last part ends before its last piece, and two have none of a hundred numbers."""
    _store, here = over_hosts.serve()
    found = run_ranks(sum_in_pieces, N_HOSTS, here, wire, n)
    assert len({digest for digest, *_ in found}) == 1
    for _, error, rows, gathered in found:
        assert 1e-4 < error < (0.03 if wire == "int8" else 0.01)
        assert rows == [[float(host)] * N_NUMBERS for host in range(N_HOSTS)] and all(gathered)
