"""Memory and exchange keep their contract on every back end: CPUs, the simulated driver, real GPUs.

On the simulated driver streams run behind the host with random pauses, so that work that is not tied to that
of the others comes too early or too late. It shows that the calls are right and in the right order, not how
fast a GPU is.
"""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collectives import COLLECTIVES, N_ELEMENTS, Place, collect, expected_collectives, read, value_of, write
from conftest import goes_wrong
from simulated import Simulation

from lockstep.backends import Backend
from lockstep.backends.host import HostBackend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.errors import PeerLost, UserError
from lockstep.exchange import Span
from lockstep.launch.ranks import run_ranks

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
ROUNDS = 10


PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("simulated: one device", id="simulated-one-device"),
    pytest.param("simulated: a device each", id="simulated-a-device-each"),
    pytest.param("gpu: one device", id="gpu-one-device", marks=pytest.mark.gpu),
]
MIXED = pytest.param("simulated: a device each beside CPUs", id="simulated-beside-cpus")
FOUR_GPUS = pytest.param("gpu: a device each", id="gpus", marks=pytest.mark.multigpu(4))
FEW_AND_MANY = [1, 2, pytest.param(3, marks=pytest.mark.slow), 4]
TWO_GPUS = pytest.param("gpu: a device each", id="gpus", marks=pytest.mark.multigpu(2))


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    text, simulation = request.param, None
    if text.startswith("simulated"):
        simulation = request.getfixturevalue("simulation").set(delay=1500, devices=4)
    kind = text if text == "cpu" else "mixed" if "beside" in text else "cuda"
    return Place(kind, "each" in text, simulation)


# -- memory --------------------------------------------------------------------------------------------------


def share_and_change(rank: int, pipes: dict[int, Pipe], place: Place) -> list[float]:
    """Rank 0 owns a block; rank 1 opens it and writes; rank 0 sees it, and frees it last."""
    memory = place.start(rank).memory
    if rank == 0:
        block = memory.allocate(4096, "a test")
        view = block.tensor(torch.float32, (2, 3), offset=64)
        assert view.eq(0).all()
        view[0, 1] = 5
        synchronise(place)
        block.send(pipes[1])
        pipes[1].receive(str, "its word that it has closed the block")
    else:
        block = memory.receive(pipes[0], "the block")
        view = block.tensor(torch.float32, (2, 3), offset=64)
        assert view.flatten().tolist() == [0, 5, 0, 0, 0, 0]
        view[1, 2] = 7
        synchronise(place)
    values: list[float] = view.flatten().tolist()
    block.close()
    block.close()
    if rank == 1:
        pipes[0].send("closed")
    return values


def synchronise(place: Place) -> None:
    if place.kind == "cuda" and place.simulation is None:
        torch.cuda.synchronize()


@pytest.mark.parametrize("place", [*PLACES[:2], PLACES[3]], indirect=True)
def test_two_processes_see_the_same_memory(place: Place) -> None:
    assert run_ranks(share_and_change, 2, place) == [[0, 5, 0, 0, 0, 7]] * 2
    assert left_of(place) == []


def left_of(place: Place) -> list[Path]:
    return list(place.simulation.folder.glob("memory-*")) if place.simulation else []


def open_and_close(rank: int, pipes: dict[int, Pipe], place: Place) -> tuple[object, object]:
    """100 rounds; what is in use before and after."""
    memory = place.start(rank).memory
    for number in range(101):
        if number == 1:  # the first round may leave what is needed once
            before = in_use(place, memory)
        if rank == 0:
            block = memory.allocate(4 << 20, "a test")
            block.send(pipes[1])
            pipes[1].receive(str, "its word")
        else:
            block = memory.receive(pipes[0], "the block")
        block.close()
        if rank == 1:
            pipes[0].send("closed")
    return before, in_use(place, memory)


def in_use(place: Place, memory: object) -> tuple[int, ...]:
    """File descriptors, mappings of shared memory, and device memory: bytes, to the nearest block."""
    descriptors = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps").read_text()
    if place.simulation:
        return descriptors, maps.count(f"{place.simulation.folder}/memory")
    if place.kind == "cpu":
        return descriptors, maps.count("memfd:lockstep")
    free, total = memory.driver.mem_get_info()  # type: ignore[attr-defined]
    return descriptors, (total - free) // (32 << 20)


ONE_DEVICE_SLOWLY = pytest.param(*PLACES[1].values, id=PLACES[1].id, marks=pytest.mark.slow)


@pytest.mark.parametrize("place", [PLACES[0], ONE_DEVICE_SLOWLY, PLACES[3]], indirect=True)
def test_nothing_leaks_in_100_rounds_of_opening_and_closing(place: Place) -> None:
    for before, after in run_ranks(open_and_close, 2, place):
        assert before == after
    assert left_of(place) == []


def lose_a_peer(rank: int, pipes: dict[int, Pipe], place: Place, folder: Path) -> None:
    """Rank 1 dies while it has rank 0's memory open; rank 0 notices, and its memory is still its own."""
    memory = place.start(rank).memory
    if rank == 1:
        memory.receive(pipes[0], "the block").tensor(torch.uint8, (10,)).fill_(9)
        synchronise(place)
        pipes[0].send("written")
        os._exit(9)
    block = memory.allocate(4096, "a test")
    block.send(pipes[1])
    pipes[1].receive(str, "its word")
    with pytest.raises(PeerLost, match="trainer 1 has left its pipe"):
        pipes[1].receive(str, "a second word")
    assert block.tensor(torch.uint8, (10,)).eq(9).all()
    block.close()
    memory.allocate(4096, "a test").close()
    (folder / "freed").touch()


@pytest.mark.parametrize("place", [*PLACES[:2], PLACES[3]], indirect=True)
def test_a_peer_that_dies_with_memory_open_leaves_the_owner_whole(place: Place, tmp_path: Path) -> None:
    with pytest.raises(EOFError):  # from the one that died
        run_ranks(lose_a_peer, 2, place, tmp_path)
    assert (tmp_path / "freed").exists()
    assert left_of(place) == []


def ask_for_too_much(rank: int, pipes: dict[int, Pipe], place: Place) -> str:
    with pytest.raises(UserError) as caught:
        place.start(rank).memory.allocate(1 << 45, "minibatches")
    return str(caught.value)


@pytest.mark.parametrize("place", [*PLACES[:2], PLACES[3]], indirect=True)
def test_a_full_device_says_how_much_was_asked_for_what_and_what_to_lower(place: Place) -> None:
    (text,) = run_ranks(ask_for_too_much, 1, place)
    assert text.startswith("no room for 33,554,432 MiB") and "(minibatches)" in text
    assert "Lower batch_size (global_batch_size, if it is set) or n_slots" in text


# -- exchange ------------------------------------------------------------------------------------------------


def average(
    rank: int, pipes: dict[int, Pipe], place: Place, kinds: list[str], n_elements: int, tied: bool
) -> list[list[bytes]]:
    """For each kind of transport, in each round: new values into this rank's arena, average, read it back.

    The host never waits for the stream before the end (staged: but within the collective).
    tied: with the transport's events, or without.
    """
    backend, group = place.start(rank), Group.on_one_host(rank, pipes)
    block = backend.memory.allocate(4 * n_elements, "a test")
    arena = block.tensor(torch.float32, (n_elements,))
    values = [value_of(rank, number, n_elements) for number in range(ROUNDS)]
    results = [np.empty((ROUNDS, n_elements), np.float32) for _ in kinds]
    for kind, result in zip(kinds, results, strict=True):
        transport, _ = backend.open_transport(kind, block, arena, group)
        if not tied:
            transport._peers_ready = transport._peers_done = []  # type: ignore[attr-defined]
        for number in range(ROUNDS):
            write(backend, block, values[number])
            transport.all_reduce((0, n_elements), "mean")
            read(backend, block, result[number])
        transport.close()  # waits for the stream
    block.close()
    return [[row.tobytes() for row in result] for result in results]


def expected_means(n_ranks: int, n_elements: int) -> list[bytes]:
    """Swap everything, then average, round by round."""
    means = []
    for number in range(ROUNDS):
        total = value_of(0, number, n_elements)
        for rank in range(1, n_ranks):
            total = total + value_of(rank, number, n_elements)
        means.append((total / np.float32(n_ranks)).tobytes())
    return means


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("place", [*PLACES, MIXED, FOUR_GPUS], indirect=True)
def test_averages_equal_swap_then_average_whatever_the_streams_do(place: Place, n_ranks: int) -> None:
    kinds = [*place.kinds(), "swap"] if place.kind == "cuda" else place.kinds()
    for results in run_ranks(average, n_ranks, place, kinds, 16 * 301, True):
        assert results == [expected_means(n_ranks, 16 * 301)] * len(kinds)
    assert left_of(place) == []


@pytest.mark.parametrize("place", [PLACES[1], MIXED, PLACES[3]], indirect=True)
def test_small_arenas_leave_some_ranks_without_a_shard(place: Place) -> None:
    kinds = [*place.kinds(), "swap"] if place.kind == "cuda" else place.kinds()
    for results in run_ranks(average, 4, place, kinds, 48, True):
        assert results == [expected_means(4, 48)] * len(kinds)


def test_without_its_events_the_exchange_would_be_wrong(simulation: Simulation) -> None:
    """The tests above can fail: the pauses are long enough to show what the events are for."""
    place = Place("cuda", False, simulation.set(delay=1500))
    expected = [expected_means(2, 16 * 301)]
    assert goes_wrong(lambda: run_ranks(average, 2, place, ["p2p"], 16 * 301, False)[0] != expected)


@pytest.mark.parametrize("n_ranks", FEW_AND_MANY)
@pytest.mark.parametrize("place", [*PLACES, MIXED, FOUR_GPUS], indirect=True)
def test_every_collective_on_any_span_leaves_numpys_bits(place: Place, n_ranks: int) -> None:
    expected = expected_collectives(n_ranks)
    for kind in place.kinds():
        for rank, results in enumerate(run_ranks(collect, n_ranks, place, kind)):
            for (name, span, argument), result, wanted in zip(
                COLLECTIVES, results, expected[rank], strict=True
            ):
                assert result == wanted, (kind, rank, name, span, argument)
    assert left_of(place) == []


def update(
    rank: int, pipes: dict[int, Pipe], place: Place, kind: str, op: Any, tied: bool
) -> tuple[list[bytes], list[bytes]]:
    """Make ROUNDS updates whose step adds the reduction, then exchange rows; return the blocks."""
    backend, group = place.start(rank), Group.on_one_host(rank, pipes)
    blocks = [backend.memory.allocate(4 * N_ELEMENTS, "a test") for _ in range(2)]
    ours, theirs = (block.tensor(torch.float32, (N_ELEMENTS,)) for block in blocks)
    transport, _ = backend.open_transport(kind, blocks[0], ours, group)
    others = transport.another(blocks[1], theirs)
    if not tied:
        others._peers_ready = transport._peers_done = []  # type: ignore[attr-defined]
    values = [value_of(rank, number, N_ELEMENTS) for number in range(ROUNDS)]
    results = np.empty((ROUNDS, N_ELEMENTS), np.float32)

    def step(span: Span) -> None:
        wait_for(backend)
        ours[slice(*span)] += theirs[slice(*span)]

    for number in range(ROUNDS):
        write(backend, blocks[1], values[number])
        transport.update(others, (0, N_ELEMENTS), op, step)
        read(backend, blocks[0], results[number])
    rows = rows_of(backend, transport)
    transport.close()
    others.close()
    return [row.tobytes() for row in results], rows


def wait_for(backend: Backend) -> None:
    """torch does not compute in the simulated stream."""
    if not isinstance(backend, HostBackend):
        backend.stream.synchronize()  # type: ignore[attr-defined]


def rows_of(backend: Backend, transport: Any) -> list[bytes]:
    """A table of 16 numbers a rank, three times, after its rows were exchanged."""
    world = transport.group.world
    block = backend.memory.allocate(4 * 16 * world.size, "a table")
    table = transport.another(block, block.tensor(torch.float32, (16 * world.size,)))
    results = np.empty((3, 16 * world.size), np.float32)
    for number, result in enumerate(results):
        mine = np.zeros(16 * world.size, np.float32)
        mine[16 * world.rank : 16 * world.rank + 16] = 100 * number + world.rank
        write(backend, block, mine)
        wait_for(backend)
        table.exchange_rows()
        read(backend, block, result)
        table.all_reduce((0, 16))  # all ranks enter another collective
    table.close()
    return [result[16:].tobytes() for result in results]


def expected_updates(n_ranks: int, op: str) -> list[bytes]:
    total, found = np.zeros(N_ELEMENTS, np.float32), []
    for number in range(ROUNDS):
        parts = [value_of(rank, number, N_ELEMENTS) for rank in range(n_ranks)]
        if op == "mean":
            total = total + functools.reduce(np.add, parts) / np.float32(n_ranks)
        else:
            while len(parts) > 1:
                parts = [
                    functools.reduce(np.add, parts[first : first + 2]) for first in range(0, len(parts), 2)
                ]
            total = total + parts[0]
        found.append(total.tobytes())
    return found


@pytest.mark.parametrize("n_ranks", FEW_AND_MANY)
@pytest.mark.parametrize("place", [*PLACES[:3], MIXED], indirect=True)
def test_updates_by_shard_leave_numpys_bits(place: Place, n_ranks: int) -> None:
    op = "mean" if n_ranks % 2 else "pairwise"
    rows = [np.repeat(100 * n + np.arange(1, n_ranks), 16).astype(np.float32).tobytes() for n in range(3)]
    for kind in place.kinds():
        for results in run_ranks(update, n_ranks, place, kind, op, True):
            assert results == (expected_updates(n_ranks, op), rows)
    assert left_of(place) == []


def test_without_its_events_an_update_would_be_wrong(simulation: Simulation) -> None:
    place = Place("cuda", False, simulation.set(delay=1500))
    expected = expected_updates(2, "mean")
    assert goes_wrong(lambda: run_ranks(update, 2, place, "p2p", "mean", False)[0][0] != expected)


def update_beside(rank: int, pipes: dict[int, Pipe], place: Place, tied: bool) -> list[bytes]:
    """Update in two buckets, each marked as soon as it is written, and reduced in a second stream."""
    backend, group = place.start(rank), Group.on_one_host(rank, pipes)
    blocks = [backend.memory.allocate(4 * N_ELEMENTS, "a test") for _ in range(2)]
    ours, theirs = (block.tensor(torch.float32, (N_ELEMENTS,)) for block in blocks)
    transport, _ = backend.open_transport("p2p", blocks[0], ours, group)
    others = transport.another(blocks[1], theirs)
    others.open_marks(len(BUCKETS))
    if not tied:
        others._peers_marks = [[] for _ in BUCKETS]  # type: ignore[attr-defined]
    values = [value_of(rank, number, N_ELEMENTS) for number in range(ROUNDS)]
    results = np.empty((ROUNDS, N_ELEMENTS), np.float32)
    for number in range(ROUNDS):
        for bucket, (first, last) in enumerate(BUCKETS):
            backend.memory.driver.memcpy_htod_async(  # type: ignore[attr-defined]
                blocks[1].pointer + 4 * first,  # type: ignore[attr-defined]
                values[number][first:last],
                backend.stream,  # type: ignore[attr-defined]
            )
            others.mark(bucket)
        transport.reduce(others, BUCKETS, "mean")
        for bucket, span in enumerate(BUCKETS):
            others.reduce_marked(bucket, others.shard(span), "mean")
        others.join_marked()
        wait_for(backend)
        for span in map(transport.shard, BUCKETS):
            ours[slice(*span)] += theirs[slice(*span)]
            transport.scatter_shard(span)
        transport.publish(BUCKETS)
        read(backend, blocks[0], results[number])
    transport.close()
    others.close()
    return [row.tobytes() for row in results]


BUCKETS = [(16 * 11, N_ELEMENTS), (0, 16 * 11)]


@pytest.mark.parametrize(
    ("place", "n_ranks"), [(PLACES[1].values[0], 3), (PLACES[2].values[0], 2)], indirect=["place"]
)
def test_buckets_that_are_folded_beside_leave_numpys_bits(place: Place, n_ranks: int) -> None:
    for results in run_ranks(update_beside, n_ranks, place, True):
        assert results == expected_updates(n_ranks, "mean")
    assert left_of(place) == []


def test_without_its_marks_an_update_beside_would_be_wrong(simulation: Simulation) -> None:
    place = Place("cuda", False, simulation.set(delay=1500))
    expected = expected_updates(2, "mean")
    assert goes_wrong(lambda: run_ranks(update_beside, 2, place, False)[0] != expected)


# -- proof ---------------------------------------------------------------------------------------------------


def choose(rank: int, pipes: dict[int, Pipe], place: Place, kind: str) -> tuple[str, str]:
    backend, group = place.start(rank), Group.on_one_host(rank, pipes)
    block = backend.memory.allocate(4096, "a test")
    try:
        transport, reason = backend.open_transport(kind, block, block.tensor(torch.float32, (16,)), group)
        transport.close()
    except UserError as error:
        return "refused", str(error)
    finally:
        block.close()
    return transport.name, reason


@pytest.mark.parametrize("place", [*PLACES[1:], TWO_GPUS], indirect=True)
def test_memory_that_can_be_reached_is_proven_and_used(place: Place) -> None:
    for name, reason in run_ranks(choose, 2, place, "auto"):
        assert name == "peer to peer"
        assert reason.startswith("all 2 pairs proven, the slowest at ") and reason.endswith(" GB/s")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_peer", "can't access 0000:02:00.0"),
        ("no_open", "can't open memory of trainer 1 by CUDA IPC"),
        (
            "lost",
            "1,048,576 numbers averaged by trainer 0 with memory of trainer 1, 0 were wrong on its own side",
        ),
        ("garbled", "and 1 on the other"),
    ],
)
@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_broken_pair_makes_all_go_through_host_memory_and_says_why(
    simulation: Simulation, fault: str, words: str, n_ranks: int
) -> None:
    place = Place("cuda", True, simulation.set(devices=4, **{fault: "0-1"}))
    for name, reason in run_ranks(choose, n_ranks, place, "auto"):
        assert name == "staged through host memory" and words in reason and "IOMMU" in reason
    for name, reason in run_ranks(choose, n_ranks, place, "p2p"):
        assert name == "refused" and reason.startswith("exchange: p2p can't be had: ") and words in reason
    assert left_of(place) == []


def test_host_memory_that_cant_be_locked_is_named(simulation: Simulation) -> None:
    place = Place("cuda", False, simulation.set(lockable=100))
    for name, reason in run_ranks(choose, 2, place, "staged"):
        assert name == "refused" and "can't be page-locked" in reason and "ulimit -l" in reason
