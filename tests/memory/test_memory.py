"""Blocks that another process opens by a handle, and pipes whose waits end."""

import ctypes
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, named_memory, wait_until
from limits import limit

from lockstep.backends import backend_of
from lockstep.comm import pipes as pipes_module
from lockstep.comm.pipes import Pipe
from lockstep.errors import DeadlinePassed, Garbled, PeerLost, UserError
from lockstep.launch.ranks import run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.memory import host
from lockstep.memory.host import HostMemory
from lockstep.memory.limits import allowed_bytes, group_limits


def share_and_change(rank: int, pipes: dict[int, Pipe]) -> list[float]:
    """Rank 0 owns a block; rank 1 opens it and writes; rank 0 sees it."""
    if rank == 0:
        block = HostMemory().allocate(4096, "a test")
        view = block.tensor(torch.float32, (2, 3), offset=64)
        assert view.eq(0).all()
        view[0, 1] = 5
        block.send(pipes[1])
        block.close()  # the receiver's hold is its own
        pipes[1].receive(str, "its word that it has written")
        return view.flatten().tolist()
    block = HostMemory().receive(pipes[0], "the block")
    view = block.tensor(torch.float32, (2, 3), offset=64)
    seen = view.flatten().tolist()
    view[1, 2] = 7
    pipes[0].send("written")
    return seen


def test_two_processes_see_the_same_bytes_and_nothing_has_a_name() -> None:
    before = named_memory()
    owner, importer = run_ranks(share_and_change, 2)
    assert importer == [0, 5, 0, 0, 0, 0]
    assert owner == [0, 5, 0, 0, 0, 7]
    assert named_memory() <= before


def test_views_outlive_close_and_closing_twice_is_harmless() -> None:
    block = HostMemory().allocate(4096, "a test")
    view = block.tensor(torch.int64, (512,))
    block.close()
    block.close()
    view.fill_(3)
    assert view.sum() == 1536


def test_a_signal_that_arrives_as_memory_is_unmapped_is_not_lost() -> None:
    def handle(number: int, frame: object) -> None:
        raise TimeoutError("a signal")

    arrive = getattr(ctypes.CDLL(None), "raise")  # its Python handler runs with the next Python code
    arrive.argtypes = [ctypes.c_int, ctypes.py_object]
    block = HostMemory().allocate(4096, "a test")
    view = block.array("u1", (4096,))
    assert block._map is not None
    arrival = weakref.ref(block._map, partial(arrive, signal.SIGUSR1))  # called before the one that unmaps
    block.close()
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError, match="a signal"):
            del view
            os.getpid()
        assert arrival() is None
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_unmapped_memory_is_forgotten() -> None:
    for _ in range(3):
        HostMemory().allocate(4096, "a test").close()
    assert sum(reference() is None for reference in host._buffers.values()) <= 1


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"no room for .* MiB of .* \(minibatches\): .*\. Lower batch_size \(global_batch_size",
    ):
        HostMemory().allocate(1 << 50, "minibatches")


def test_memory_that_is_not_available_yet_can_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine's memory may grow while it is used."""
    small = {"MemTotal": 1 << 40, "MemAvailable": 4096}
    monkeypatch.setattr("lockstep.memory.limits.memory_of_machine", lambda: small)
    block = HostMemory().allocate(1 << 20, "minibatches")
    assert block.n_bytes == 1 << 20
    block.close()


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/user/job\n", {"user/job/memory.max": "max", "user/memory.max": "5000"}, [(5000, 0)]),
        (
            "0::/user/job\n",
            {
                "user/job/memory.max": "4000",
                "user/job/memory.current": "3000",
                "user/job/memory.stat": "anon 900\ninactive_file 600\nactive_file 1500",
                "user/memory.max": "5000",
            },
            [(4000, 900), (5000, 0)],
        ),
        ("0::/\n", {"memory.max": "6000"}, [(6000, 0)]),  # a container that sees its own group as the root
        ("0::/user\n", {"user/memory.max": "max"}, []),
        (
            "3:cpu:/\n5:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "7000",
                "memory/job/memory.usage_in_bytes": "2000",
                "memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 500",
            },
            [(7000, 1500)],
        ),
        # a container that does not see the way to its own group
        ("5:memory:/docker/ab\n0::/\n", {"memory/memory.limit_in_bytes": "8000"}, [(8000, 0)]),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, []),
        ("", {}, []),
    ],
)
def test_limits_of_control_groups_are_seen(
    tmp_path: Path, groups: str, files: dict[str, str], expected: list[tuple[int, int]]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "cgroup").write_text(groups)
    found = [(group.limit, group.used) for group in group_limits(tmp_path / "cgroup", tmp_path)]
    assert found == expected
    assert list(group_limits(tmp_path / "nowhere", tmp_path)) == []
    left = allowed_bytes(tmp_path / "cgroup", tmp_path)
    assert left == min(limit - used for limit, used in expected) if expected else left > 10_000


ASK = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
from lockstep.errors import UserError
from lockstep.memory.host import HostMemory
try:
    HostMemory().allocate(1 << 29, "minibatches")
except UserError as error:
    print(error)
"""


def test_what_a_control_group_forbids_is_refused_instead_of_killed() -> None:
    """Uses a real control group, if this machine permits it."""
    top = Path("/sys/fs/cgroup")
    parent = top / "memory" if (top / "memory").is_dir() else top
    group = parent / f"lockstep-test-{os.getpid()}"
    try:
        group.mkdir()
        limits = [group / name for name in ("memory.limit_in_bytes", "memory.max")]
        next(file for file in limits if file.exists()).write_text(str(1 << 28))
    except (OSError, StopIteration) as error:
        pytest.skip(f"control groups can't be made here: {error}")
    try:
        words = [sys.executable, "-c", ASK, str(group / "cgroup.procs")]
        result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit(30))
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("no room for 512 MiB of shared host memory (minibatches): 2")
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


def test_views_must_fit() -> None:
    block = HostMemory().allocate(4096, "a test")
    with pytest.raises(AssertionError, match="does not fit"):
        block.tensor(torch.float32, (1000,), offset=400)


def test_blocks_do_not_leak() -> None:
    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:lockstep")
        return len(os.listdir("/proc/self/fd")), maps

    before = count()
    for _ in range(100):
        HostMemory().allocate(1 << 20, "a test").close()
    assert count() == before


# A thread maps memory while Python, which is ending, goes over many finalizers.
ENDING = """
import sys, threading, weakref
from lockstep.memory.host import HostMemory

def allocate():
    blocks = []
    while True:
        blocks.append(HostMemory().pinned(4096))

class Thing:
    pass

things = [Thing() for _ in range(200_000)]
for thing in things:
    weakref.finalize(thing, print).atexit = False
sys.setswitchinterval(1e-6)
threading.Thread(target=allocate, daemon=True).start()
"""


def test_threads_may_map_memory_while_python_ends() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_wait_ends_at_its_deadline_and_names_whom_it_waited_for() -> None:
    ours, theirs = multiprocessing.Pipe()
    pipe = Pipe(ours, "loader 7", 1)
    peer = Pipe(theirs, "trainer 7", 1)
    peer.send("here I am")  # until then it may be starting, which takes its time
    assert pipe.receive(str, "its first message") == "here I am"
    begin = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"waited 1 s for loader 7 \(its next minibatch\)") as caught:
        pipe.receive(str, "its next minibatch")
    assert 0.9 < time.monotonic() - begin < limit(5)
    assert caught.value.peer == "loader 7"


def test_a_pipe_that_nobody_empties_ends_in_an_error() -> None:
    ours, theirs = multiprocessing.Pipe()
    pipe = Pipe(ours, "loader 7", 1)
    peer = Pipe(theirs, "trainer 7", 1)
    peer.send("here I am")
    pipe.receive(str, "its first message")
    with pytest.raises(DeadlinePassed, match="waited 1 s for loader 7 to read its messages"):
        for _ in range(10_000):
            pipe.send("x" * 1000)


def test_a_closed_pipe_is_noticed_at_once() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    pipe = Pipe(ours, "trainer 1", 30)
    with pytest.raises(PeerLost, match=r"trainer 1 has left its pipe \(to meet\)") as caught:
        pipe.receive(str, "to meet")
    assert caught.value.peer == "trainer 1"
    with pytest.raises(PeerLost):
        pipe.send("anyone there?")
    with pytest.raises(PeerLost):
        pipe.receive_descriptor("a descriptor")


@pytest.mark.parametrize("place", [3, 10, 14, 40])
def test_a_garbled_message_is_refused_before_it_is_unpickled(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage is in the length, in either checksum, or in the bytes that they cover."""
    ours, theirs = multiprocessing.Pipe()
    sender, receiver = Pipe(ours, "trainer 0", 5), Pipe(theirs, "trainer 1", 5)
    sender.send("x" * 100)
    receiver._take_in()
    receiver._incoming[place] ^= 1
    monkeypatch.setattr(pipes_module.pickle, "loads", None)
    assert receiver.poll()
    with pytest.raises(Garbled, match="what trainer 1 sent is no message"):
        receiver.receive(str, "a greeting")


def test_status_boards_show_the_last_line_and_cut_long_ones() -> None:
    board = StatusBoard.create()
    assert (board.read(), board.count()) == ("", 0)
    board.say("a long line about something")
    board.say("short ä")
    assert (board.read(), board.count()) == ("short ä", 2)
    board.say("x" * 10000)
    assert board.read() == "x" * 500
    assert board.count() == 3


@pytest.mark.skipif(importlib.util.find_spec("pycuda") is not None, reason="PyCUDA is installed here")
def test_a_gpu_without_pycuda_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"cuda:0 needs PyCUDA.*install it.*docs/install\.md"):
        backend_of("cuda:0")
