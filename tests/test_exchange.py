"""Averaging in shards, in real processes, against the plain way: swap everything, then average."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.exchange import shard
from lockstep.exchange.host import CHUNK, HostExchange
from lockstep.memory.host import HostMemory
from lockstep.peers import Peers
from lockstep.pipes import Pipe
from lockstep.ranks import run_ranks


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
    rank: int, pipes: dict[int, Pipe], n_elements: int, dtype: torch.dtype, n_rounds: int
) -> np.ndarray:
    """n_rounds of: add something of one's own, meet, average, meet."""
    peers = Peers(rank, pipes)
    block = HostMemory().allocate(n_elements * dtype.itemsize, "a test")
    arena = block.tensor(dtype, (n_elements,))
    arena.copy_(initial(rank, n_elements, dtype))
    exchange = HostExchange.open(block, arena, peers)
    for number in range(n_rounds):
        arena += rank * 0.37 + number
        peers.meet(f"updated {number}")
        exchange.average()
        peers.meet(f"averaged {number}")
    return arena.numpy().copy()


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_swap_then_average_bit_for_bit(n_ranks: int, dtype: torch.dtype) -> None:
    n_elements, n_rounds = 3 * CHUNK + 16 * 7 + 5, 3
    expected = [initial(rank, n_elements, dtype) for rank in range(n_ranks)]
    for number in range(n_rounds):
        updated = [arena + (rank * 0.37 + number) for rank, arena in enumerate(expected)]
        expected = [swap_then_average(updated)] * n_ranks
    for result in run_ranks(average, n_ranks, n_elements, dtype, n_rounds):
        assert result.tobytes() == expected[0].numpy().tobytes()


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_shards_cover_everything_once(n_elements: int, n_ranks: int) -> None:
    shards = [shard(n_elements, rank, n_ranks) for rank in range(n_ranks)]
    assert shards[0][0] == 0 and shards[-1][1] == n_elements
    assert all(ours[1] == following[0] for ours, following in itertools.pairwise(shards))
    assert all(first <= last for first, last in shards)


def test_small_arenas_leave_some_ranks_without_a_shard() -> None:
    arenas = [torch.arange(20.0) + rank for rank in range(4)]
    for rank in range(4):
        HostExchange(arenas, rank).average()
    for arena in arenas:
        assert torch.equal(arena, torch.arange(20.0) + 1.5)


def meet_with_payloads(rank: int, pipes: dict[int, Pipe]) -> list[int]:
    return Peers(rank, pipes).meet("here", rank * 10)


def test_a_meeting_gives_everyone_all_payloads_in_rank_order() -> None:
    assert run_ranks(meet_with_payloads, 3) == [[0, 10, 20]] * 3
    assert Peers(0, {}).meet("alone", 5) == [5]
