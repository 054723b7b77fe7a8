"""PyCUDA memory, IPC, events and the peer-to-peer exchange in real processes, on a simulated driver.

It shows that the calls are right and in the right order, not how fast a GPU is. Streams of the simulation run
behind the host, with random pauses, so that work which is not tied to the other ranks' by events comes too
early or too late.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from lockstep.errors import PeerLost, UserError
from lockstep.exchange.p2p import PeerExchange
from lockstep.memory.cuda import LEAST_BYTES, CudaMemory
from lockstep.peers import Peers
from lockstep.pipes import Pipe
from lockstep.ranks import run_ranks

sys.path.insert(0, str(ROOT / "tests" / "cuda_sim"))
import build
import simulated
from simulated import Simulation

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    toolkit = build.toolkit()
    if toolkit is None:
        pytest.skip("no CUDA toolkit here (nvcc with its headers, and g++) to build PyCUDA with")
    folder = tmp_path_factory.mktemp("parts")
    site = build.build_pycuda(toolkit)
    return site, build.build_driver(folder, toolkit, build.names_needed(site)), build.build_kernels(folder)


@pytest.fixture
def simulation(parts: tuple[Path, Path, Path], tmp_path: Path) -> Simulation:
    return Simulation(*parts, tmp_path, {})


def with_settings(simulation: Simulation, **settings: object) -> Simulation:
    values = {f"CUDA_SIM_{name.upper()}": str(value) for name, value in settings.items()}
    return Simulation(simulation.site, simulation.driver, simulation.kernels, simulation.folder, values)


def share_and_change(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> list[float]:
    """Rank 0 owns a block on device 0; rank 1 opens it and writes; rank 0 sees it, and frees it last."""
    simulated.use(simulation)
    memory = CudaMemory("cuda:0")
    if rank == 0:
        block = memory.allocate(4096)
        view = block.tensor(torch.float32, (2, 3), offset=64)
        assert view.eq(0).all()
        view[0, 1] = 5
        block.send(pipes[1])
        pipes[1].receive(str, "its word that it has closed the block")
    else:
        block = memory.receive(pipes[0], "the block")
        view = block.tensor(torch.float32, (2, 3), offset=64)
        assert view.flatten().tolist() == [0, 5, 0, 0, 0, 0]
        view[1, 2] = 7
    values = view.flatten().tolist()
    block.close()
    block.close()
    if rank == 1:
        pipes[0].send("closed")
    memory.close()
    return values


def test_two_processes_see_the_same_device_memory(simulation: Simulation) -> None:
    assert run_ranks(share_and_change, 2, simulation) == [[0, 5, 0, 0, 0, 7]] * 2
    assert list(simulation.folder.glob("memory-*")) == []


def open_and_close(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> tuple[int, int]:
    """100 rounds; returns the mappings of device memory before and after."""
    simulated.use(simulation)
    memory = CudaMemory("cuda:1")

    def count() -> int:
        return Path("/proc/self/maps").read_text().count(f"{simulation.folder}/memory")

    before = count()
    for _ in range(100):
        if rank == 0:
            block = memory.allocate(LEAST_BYTES)
            block.send(pipes[1])
            pipes[1].receive(str, "its word")
        else:
            block = memory.receive(pipes[0], "the block")
        block.close()
        if rank == 1:
            pipes[0].send("closed")
    memory.close()
    return before, count()


def test_nothing_leaks_in_100_rounds_of_opening_and_closing(simulation: Simulation) -> None:
    assert run_ranks(open_and_close, 2, simulation) == [(0, 0), (0, 0)]
    assert list(simulation.folder.glob("memory-*")) == []


def ask_for_too_much(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> str:
    simulated.use(simulation)
    memory = CudaMemory("cuda:0")
    with pytest.raises(UserError) as caught:
        memory.allocate(1 << 30)
    with pytest.raises(UserError, match="cuda:5 can't be used"):
        CudaMemory("cuda:5")
    memory.close()
    return str(caught.value)


def test_a_full_device_and_one_that_is_not_there_are_named(simulation: Simulation) -> None:
    small = with_settings(simulation, memory=8 << 20)
    expected = "no room for 1,024 MiB on cuda:0: 8 of 8 MiB are free; lower batch_size or n_slots"
    assert run_ranks(ask_for_too_much, 1, small) == [expected]


def value_of(rank: int, number: int, n_elements: int) -> np.ndarray:
    random = np.random.default_rng([rank, number])
    return (random.standard_normal(n_elements) * 10.0 ** random.integers(-9, 9)).astype(np.float32)


def average(
    rank: int,
    pipes: dict[int, Pipe],
    simulation: Simulation,
    devices: list[str],
    n_elements: int,
    n_rounds: int,
    tied: bool,
) -> list[bytes]:
    """In each round the stream writes new values into this rank's arena, averages, and reads the arena back.

    The host never waits for the stream before the end. tied: with the exchange's events, or without.
    """
    simulated.use(simulation)
    memory, peers = CudaMemory(devices[rank]), Peers(rank, pipes)
    driver = memory.driver
    block, stream = memory.allocate(4 * n_elements), driver.Stream(1)
    for pipe in pipes.values():
        block.send(pipe)
    opened = {other: memory.receive(pipe, "its arena") for other, pipe in pipes.items()}
    blocks = {**opened, rank: block}
    pointers = [blocks[other].pointer for other in sorted(blocks)]
    exchange = PeerExchange(driver, stream, pointers, n_elements, peers)
    if not tied:
        exchange._peers_updated, exchange._peers_averaged = [], []
    values = [value_of(rank, number, n_elements) for number in range(n_rounds)]
    results = [np.empty(n_elements, np.float32) for _ in range(n_rounds)]
    for number in range(n_rounds):
        driver.memcpy_htod_async(block.pointer, values[number], stream)
        exchange.updated()
        peers.meet(f"updated {number}")
        exchange.average()
        peers.meet(f"averaged {number}")
        exchange.averaged()
        driver.memcpy_dtoh_async(results[number], block.pointer, stream)
    stream.synchronize()
    peers.meet("all streams are done")
    for importer in opened.values():
        importer.close()
    peers.meet("all importers have closed")
    del exchange, stream  # PyCUDA's objects go before their context
    block.close()
    memory.close()
    return [result.tobytes() for result in results]


def expected_means(n_ranks: int, n_elements: int, n_rounds: int) -> list[bytes]:
    """Swap everything, then average, round by round."""
    means = []
    for number in range(n_rounds):
        total = value_of(0, number, n_elements)
        for rank in range(1, n_ranks):
            total = total + value_of(rank, number, n_elements)
        means.append((total / np.float32(n_ranks)).tobytes())
    return means


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("place", ["one device", "a device each"])
def test_the_exchange_equals_swap_then_average_whatever_the_streams_do(
    simulation: Simulation, n_ranks: int, place: str
) -> None:
    n_elements, n_rounds = 16 * 301, 12
    devices = ["cuda:0"] * n_ranks if place == "one device" else [f"cuda:{rank}" for rank in range(n_ranks)]
    slow = with_settings(simulation, delay=2000, devices=4)
    results = run_ranks(average, n_ranks, slow, devices, n_elements, n_rounds, True)
    expected = expected_means(n_ranks, n_elements, n_rounds)
    for result in results:
        assert result == expected
    assert list(simulation.folder.glob("memory-*")) == []


def test_without_its_events_the_exchange_would_be_wrong(simulation: Simulation) -> None:
    """The test above can fail: the pauses are long enough to show what the events are for."""
    slow = with_settings(simulation, delay=2000)
    results = run_ranks(average, 2, slow, ["cuda:0", "cuda:0"], 16 * 301, 12, False)
    assert results[0] != expected_means(2, 16 * 301, 12)


def lose_a_peer(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> str:
    """Rank 1 dies while it has rank 0's memory open; rank 0 notices, and its memory is still its own."""
    simulated.use(simulation)
    memory = CudaMemory("cuda:0")
    if rank == 1:
        memory.receive(pipes[0], "the block").tensor(torch.uint8, (10,)).fill_(9)
        pipes[0].send("written")
        os._exit(9)
    block = memory.allocate(4096)
    block.send(pipes[1])
    pipes[1].receive(str, "its word")
    with pytest.raises(PeerLost, match="trainer 1 has left its pipe"):
        pipes[1].receive(str, "a second word")
    assert block.tensor(torch.uint8, (10,)).eq(9).all()
    block.close()
    memory.close()
    (simulation.folder / "freed").touch()
    return "freed"


def test_a_peer_that_dies_with_memory_open_leaves_the_owner_whole(simulation: Simulation) -> None:
    with pytest.raises(EOFError):  # from the one that died
        run_ranks(lose_a_peer, 2, simulation)
    assert (simulation.folder / "freed").exists()
    assert list(simulation.folder.glob("memory-*")) == []
