"""Collectives in host memory, in real processes, against the reference: swap everything, then reduce."""

import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.group import Group, World
from lockstep.comm.pipes import Pipe
from lockstep.exchange import OPS, Op, shard
from lockstep.exchange.host import HostTransport
from lockstep.exchange.reduction import CHUNK
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory


def swap_then_average(arenas: list[torch.Tensor]) -> torch.Tensor:
    """The reference: every rank has a copy of every arena and averages them in rank order."""
    total = arenas[0].clone()
    for arena in arenas[1:]:
        total += arena
    return total / len(arenas)


def initial(rank: int, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
    random = np.random.default_rng(rank)
    scale = 10.0 ** random.integers(-20, 20, n_elements)
    return torch.from_numpy(random.standard_normal(n_elements) * scale).to(dtype)


def average(
    rank: int, pipes: dict[int, Pipe], n_elements: int, dtype: torch.dtype, n_rounds: int, n_threads: int
) -> np.ndarray:
    """Add a value of this rank and average, n_rounds times."""
    block = HostMemory().allocate(n_elements * dtype.itemsize, "a test")
    arena = block.tensor(dtype, (n_elements,))
    arena.copy_(initial(rank, n_elements, dtype))
    group = Group.on_one_host(rank, pipes)
    transport = HostTransport.open(block, arena.numpy().dtype, n_elements, group, n_threads)
    for number in range(n_rounds):
        arena += rank * 0.37 + number
        transport.all_reduce((0, n_elements), "mean")
    transport.close()
    return arena.numpy().copy()


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_swap_then_average_bit_for_bit(n_ranks: int, dtype: torch.dtype) -> None:
    n_elements, n_rounds = 3 * CHUNK + 16 * 7 + 5, 3
    expected = [initial(rank, n_elements, dtype) for rank in range(n_ranks)]
    for number in range(n_rounds):
        updated = [arena + (rank * 0.37 + number) for rank, arena in enumerate(expected)]
        expected = [swap_then_average(updated)] * n_ranks
    for result in run_ranks(average, n_ranks, n_elements, dtype, n_rounds, 1 + n_ranks % 2):
        assert result.tobytes() == expected[0].numpy().tobytes()


@given(st.integers(0, 500), st.integers(0, 10_000), st.integers(1, 9))
def test_shards_cover_a_span_once_and_begin_on_the_alignment(start: int, size: int, n_ranks: int) -> None:
    first, last = 16 * start, 16 * start + size
    shards = [shard((first, last), rank, n_ranks) for rank in range(n_ranks)]
    assert shards[0][0] == first and shards[-1][1] == last
    assert all(begin % 16 == 0 or begin == end for begin, end in shards)
    assert all(ours[1] == following[0] for ours, following in itertools.pairwise(shards))
    assert all(begin <= end for begin, end in shards)


class SingleHost(Group):
    """A rank whose barriers the test sees to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pipes: dict[int, Any] = {rank: None for rank in range(world.size) if rank != world.rank}

    def all_gather(self, point: str, payload: object = None) -> list[object]:
        return [payload]


def in_turn(arrays: list[np.ndarray]) -> list[HostTransport]:
    """All ranks' transports in this process, to be called one after the other."""
    return [HostTransport(arrays, SingleHost(world)) for world in World.on_one_host(len(arrays))]


def test_small_arenas_leave_some_ranks_without_a_shard() -> None:
    arrays = [np.arange(20.0) + rank for rank in range(4)]
    for transport in in_turn(arrays):
        transport.all_reduce((0, 20), "mean")
    for array in arrays:
        assert np.array_equal(array, np.arange(20.0) + 1.5)


@given(st.integers(1, 4), st.sampled_from(OPS), st.integers(0, 3), st.integers(0, 90), st.integers(0, 40))
def test_an_all_reduce_touches_its_span_only(
    n_ranks: int, op: Op, start: int, size: int, behind: int
) -> None:
    first, last = 16 * start, 16 * start + size
    random = np.random.default_rng(size)
    before = [random.standard_normal(last + behind) for _ in range(n_ranks)]
    functions = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
    functions["pairwise"] = np.sum
    expected = functions[op](np.stack(before), axis=0)
    arrays = [array.copy() for array in before]
    for transport in in_turn(arrays):
        transport.all_reduce((first, last), op)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_allclose(array[first:last], expected[first:last], rtol=1e-12)
        assert array[:first].tobytes() == old[:first].tobytes()
        assert array[last:].tobytes() == old[last:].tobytes()
    assert len({array[first:last].tobytes() for array in arrays}) == 1


def gather_payloads(rank: int, pipes: dict[int, Pipe]) -> list[int]:
    return Group.on_one_host(rank, pipes).all_gather("here", rank * 10)


def test_all_gather_gives_everyone_all_payloads_in_rank_order() -> None:
    assert run_ranks(gather_payloads, 3) == [[0, 10, 20]] * 3
    assert Group.on_one_host(0, {}).all_gather("alone", 5) == [5]


def gather_much(rank: int, pipes: dict[int, Pipe]) -> list[bytes]:
    payloads = Group.on_one_host(rank, pipes).all_gather("here", bytes([rank]) * (50 << 20))
    return [payload[:1] + payload[-1:] for payload in payloads if len(payload) == 50 << 20]


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_payloads_of_50_megabytes_meet_without_a_deadlock(n_ranks: int) -> None:
    """Each rank sends before it receives: a rank that waits to send also receives."""
    expected = [bytes([rank] * 2) for rank in range(n_ranks)]
    assert run_ranks(gather_much, n_ranks) == [expected] * n_ranks


def descriptors_after_opening(rank: int, pipes: dict[int, Pipe]) -> int:
    block = HostMemory().allocate(4096, "a test")
    before = len(os.listdir("/proc/self/fd"))
    transport = HostTransport.open(block, "f4", 1024, Group.on_one_host(rank, pipes))
    kept = len(os.listdir("/proc/self/fd")) - before
    transport.close()
    return kept


def test_opening_the_blocks_of_the_others_keeps_no_descriptor() -> None:
    assert run_ranks(descriptors_after_opening, 3) == [0, 0, 0]
