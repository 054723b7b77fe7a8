"""The simulated driver enforces the real one's rules that are easily broken unnoticed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import simulated
from conftest import ROOT
from limits import limit
from simulated import Simulation

from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.launch.ranks import run_ranks
from lockstep.memory import pagelock
from lockstep.memory.cuda import NON_BLOCKING, CudaMemory
from lockstep.memory.host import HostMemory

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
N_BYTES = 4 << 20


def _memory(simulation: Simulation, device: str = "cuda:0") -> CudaMemory:
    simulated.use(simulation)
    return CudaMemory(device)


def elapsed_times(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> None:
    memory = _memory(simulation.set(delay=20_000))
    driver, stream = memory.driver, memory.driver.Stream()
    begin, end = driver.Event(), driver.Event()
    with pytest.raises(driver.Error):
        end.time_since(begin)  # neither was recorded
    begin.record(stream)
    end.record(stream)
    with pytest.raises(driver.Error):
        end.time_since(begin)  # not done
    end.synchronize()
    assert end.time_since(begin) >= 0
    (untimed,) = memory.events(1)
    untimed.record(stream).synchronize()
    with pytest.raises(driver.Error):
        untimed.time_since(begin)


def test_elapsed_times_need_events_that_are_timed_and_done(simulation: Simulation) -> None:
    run_ranks(elapsed_times, 1, simulation)


def free_and_queue(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> tuple[bool, bool]:
    """Free memory and fill the queue: freeing waits for the device, and the host can't run ahead for ever."""
    memory = _memory(simulation.set(delay=1000))
    stream = memory.driver.Stream()
    block, other = (memory.allocate(N_BYTES, "a test") for _ in range(2))
    for _ in range(200):
        memory.driver.memset_d8_async(block.pointer, 1, 8, stream)
    other.close()
    drained = stream.is_done()
    for _ in range(3000):
        memory.driver.memset_d8_async(block.pointer, 1, 8, stream)
    behind = 0
    begin = time.monotonic()
    stream.synchronize()
    behind = time.monotonic() - begin
    return drained, behind < 3000 * 0.0005


def test_freeing_waits_for_the_device_and_queues_are_bounded(simulation: Simulation) -> None:
    assert run_ranks(free_and_queue, 1, simulation) == [(True, True)]


def order_of_streams(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> list[int]:
    """Return what one stream reads of another's pending write, while the other waits."""
    memory = _memory(simulation)
    driver, found = memory.driver, []
    block, other, seen = (memory.allocate(N_BYTES, "a test") for _ in range(3))
    blocking, another, apart = driver.Stream(), driver.Stream(), driver.Stream(NON_BLOCKING)
    for first, second in (
        (None, blocking),
        (blocking, None),
        (None, apart),
        (apart, None),
        (another, blocking),
    ):
        memory.context.synchronize()
        for stream in (blocking, another, apart):
            stream.synchronize()
        memory.upload(block, np.zeros(1, np.uint8))
        for _ in range(100):  # 4 MiB each: it takes a while
            driver.memcpy_dtod_async(other.pointer, seen.pointer, N_BYTES, first)
        driver.memset_d8_async(block.pointer, 1, 1, first)
        answer = memory.pinned(1)
        driver.memcpy_dtoh_async(answer, block.pointer, second)
        (second.synchronize if second else memory.context.synchronize)()
        found.append(int(answer[0]))
    return found


def test_a_blocking_stream_and_the_default_one_wait_for_each_other(simulation: Simulation) -> None:
    """cuStreamCreate's flags: those that are not blocking overtake the default stream, and it them."""
    assert run_ranks(order_of_streams, 1, simulation.set(delay=500)) == [[1, 1, 0, 0, 0]]


def use_wrongly(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> None:
    memory, other = _memory(simulation), CudaMemory("cuda:1")  # now current
    block = memory.allocate(N_BYTES, "a test")  # on cuda:1, whose context is current
    driver = memory.driver
    other.context.pop()
    with pytest.raises(driver.Error):
        driver.memcpy_htod(block.pointer, np.zeros(8, np.uint8))
    with pytest.raises(driver.Error):
        driver.memset_d8(block.pointer, 0, 8)
    with pytest.raises(driver.Error):
        driver.memcpy_htod(12345, np.zeros(8, np.uint8))
    with pytest.raises(driver.Error):
        memory.events(1)[0].ipc_handle()  # not one to be shared
    other.context.push()
    block.close()
    host = HostMemory().allocate(8192, "a test")
    pagelock.pagelock(host)
    with pytest.raises(UserError, match="CUDA error 712"):
        pagelock.pagelock(host)
    pagelock.unlock(host)
    pagelock.pagelock(host)


def test_memory_of_another_device_and_memory_locked_twice_are_refused(simulation: Simulation) -> None:
    run_ranks(use_wrongly, 1, simulation)


HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import simulated
from pathlib import Path
simulated.use(simulated.Simulation(*(Path(part) for part in sys.argv[2:6]), {}))
from lockstep.memory.cuda import CudaMemory
memory = CudaMemory("cuda:0")
events = memory.shared_events(2)
allocation = memory.allocate(5 << 20, "a test")
allocation.handle()  # refused where it is no multiple of 2 MiB
print("made", flush=True)
if sys.argv[6] == "stay":
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leave", "stay"])
def test_shared_events_are_files_that_only_a_killed_process_leaves(simulation: Simulation, how: str) -> None:
    parts = [
        str(part) for part in (simulation.site, simulation.driver, simulation.kernels, simulation.folder)
    ]
    command = [sys.executable, "-c", HOLD, str(Path(simulated.__file__).parent), *parts, how]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "made\n"

    def files() -> list[Path]:
        return list(Path("/dev/shm").glob(f"cuda.shm.*.{process.pid:x}.*"))

    if how == "stay":
        assert len(files()) == 2
        process.send_signal(signal.SIGKILL)
    process.wait(limit(60))
    left = files()
    for path in left:
        path.unlink()
    assert len(left) == (2 if how == "stay" else 0)


STALE = """
import os
names = [f"/dev/shm/cuda.shm.{os.getuid():x}.{os.getpid():x}.{number:x}" for number in range(64)]
for name in names:
    open(name, "x").close()
"""


@pytest.mark.slow
def test_an_event_replaces_the_file_of_a_killed_process_with_the_same_number(simulation: Simulation) -> None:
    """Process numbers come again: a trainer could not share its events, and a run was not resized."""
    parts = [
        str(part) for part in (simulation.site, simulation.driver, simulation.kernels, simulation.folder)
    ]
    program = STALE + HOLD + "for name in names: os.path.exists(name) and os.remove(name)"
    command = [sys.executable, "-c", program, str(Path(simulated.__file__).parent), *parts, "leave"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert (done.stdout, done.returncode) == ("made\n", 0), done.stderr
