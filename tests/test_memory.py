"""Blocks that another process opens by a handle, and pipes whose waits end."""

import importlib.util
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from limits import limit

from lockstep.backends import backend_of
from lockstep.comm.pipes import Pipe
from lockstep.errors import DeadlinePassed, PeerLost, UserError
from lockstep.launch.ranks import run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.memory.host import HostMemory


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
    before = set(os.listdir("/dev/shm"))
    owner, importer = run_ranks(share_and_change, 2)
    assert importer == [0, 5, 0, 0, 0, 0]
    assert owner == [0, 5, 0, 0, 0, 7]
    assert set(os.listdir("/dev/shm")) == before


def test_views_outlive_close_and_closing_twice_is_harmless() -> None:
    block = HostMemory().allocate(4096, "a test")
    view = block.tensor(torch.int64, (512,))
    block.close()
    block.close()
    view.fill_(3)
    assert view.sum() == 1536


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"no room for [\d,]+ MiB of shared host memory \(minibatches\); lower batch_size"
    ):
        HostMemory().allocate(1 << 50, "minibatches")


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


def test_a_wait_ends_at_its_deadline_and_names_whom_it_waited_for() -> None:
    ours, theirs = multiprocessing.Pipe()
    pipe = Pipe(ours, "loader 7", 1)
    theirs.send("here I am")  # until then it may be starting, which takes its time
    assert pipe.receive(str, "its first message") == "here I am"
    begin = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"waited 1 s for loader 7 \(its next minibatch\)") as caught:
        pipe.receive(str, "its next minibatch")
    assert 0.9 < time.monotonic() - begin < limit(5)
    assert caught.value.peer == "loader 7"


def test_a_pipe_that_nobody_empties_ends_in_an_error() -> None:
    ours, theirs = multiprocessing.Pipe()
    pipe = Pipe(ours, "loader 7", 1)
    theirs.send("here I am")
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
