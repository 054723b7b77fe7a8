"""Every transport completes the tree of logical ranks from several partial sums of each rank."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from collectives import N_ELEMENTS, Place, read, value_of, write
from simulated import Simulation

from lockstep.backends.host import HostBackend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.exchange import Span
from lockstep.exchange.p2p import check_sources
from lockstep.exchange.tree import PartialSums, maximal_subtrees, middle
from lockstep.launch.ranks import run_ranks

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
N_LEAVES = 8
DIVISIONS = [(0, 1, 6, 8), (0, 2, 4, 6, 8), (0, 7, 8), (0, 3, 6, 8)]  # each after the other, in one run


def node_sum(first: int, last: int, number: int) -> np.ndarray:
    """The sum of consecutive leaves along the tree."""
    if last - first == 1:
        return value_of(first, number, N_ELEMENTS)
    split = middle((first, last))
    return node_sum(first, split, number) + node_sum(split, last, number)


def block_of(leaves: Span, number: int, n_sums: int) -> np.ndarray:
    """A rank's block: its last partial sum, then the others."""
    sums = [node_sum(*node, number) for node in maximal_subtrees(leaves, (0, N_LEAVES))]
    block = np.zeros((n_sums, N_ELEMENTS), np.float32)
    block[: len(sums)] = [sums[-1], *sums[:-1]]
    return block.ravel()


def complete(rank: int, pipes: dict[int, Pipe], place: Place, kind: str) -> list[bytes]:
    """Add the sum of all leaves to this rank's arena, with one division after the other."""
    backend, group, n_sums = place.start(rank), Group.on_one_host(rank, pipes), 4
    blocks = [backend.memory.allocate(4 * n * N_ELEMENTS, "a test") for n in (1, n_sums)]
    ours = blocks[0].tensor(torch.float32, (N_ELEMENTS,))
    theirs = blocks[1].tensor(torch.float32, (n_sums * N_ELEMENTS,))
    transport, _ = backend.open_transport(kind, blocks[0], ours, group)
    others = transport.another(blocks[1], theirs)
    divisions = [bounds for bounds in DIVISIONS if len(bounds) == len(pipes) + 2]
    values = [block_of(bounds[rank : rank + 2], n, n_sums) for n, bounds in enumerate(divisions)]  # type: ignore[arg-type]
    results = np.empty((len(divisions), N_ELEMENTS), np.float32)

    def step(span: Span) -> None:
        if not isinstance(backend, HostBackend):
            backend.stream.synchronize()  # type: ignore[attr-defined]
        ours[slice(*span)] += theirs[slice(*span)]

    for bounds, value, result in zip(divisions, values, results, strict=True):
        others.use_partial_sums(PartialSums.of_ranges(bounds, N_LEAVES, N_ELEMENTS))
        write(backend, blocks[1], value)
        transport.update(others, (0, N_ELEMENTS), "pairwise", step)
        read(backend, blocks[0], result)
    transport.close()
    others.close()
    return [result.tobytes() for result in results]


def expected(n_ranks: int) -> list[bytes]:
    total, found = np.zeros(N_ELEMENTS, np.float32), []
    for number in range(sum(len(bounds) == n_ranks + 1 for bounds in DIVISIONS)):
        total = total + node_sum(0, N_LEAVES, number)
        found.append(total.tobytes())
    return found


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_partial_sums_in_host_memory_leave_numpys_bits(n_ranks: int) -> None:
    assert all(min(last - first for first, last in pairwise(bounds)) for bounds in DIVISIONS)
    for results in run_ranks(complete, n_ranks, Place("cpu", False, None), "auto"):
        assert results == expected(n_ranks)


@pytest.mark.parametrize("n_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("device", "kind"), [("cuda", "p2p"), ("cuda", "staged"), ("mixed", "staged")])
def test_partial_sums_on_the_simulated_driver_leave_numpys_bits(
    simulation: Simulation, device: str, kind: str, n_ranks: int
) -> None:
    place = Place(device, False, simulation.set(delay=1500, devices=4))
    for results in run_ranks(complete, n_ranks, place, kind):
        assert results == expected(n_ranks)


def test_more_partial_sums_than_a_kernel_takes_are_refused() -> None:
    with pytest.raises(UserError, match="GPUs add up 64 partial sums at most, and these shares have 65"):
        check_sources(PartialSums.of_ranks(65))
