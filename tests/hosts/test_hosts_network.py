"""Two hosts with a network of their own between them: namespaces of the kernel, where root may make them."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from conftest import Program, Running
from limits import limit
from two_hosts import free_port, listened_on, start_one

ADDRESSES = ("10.231.77.1", "10.231.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """The names of two network namespaces with a link between them; skips where they can't be had."""
    names = [f"lockstep{os.getpid()}{letter}" for letter in "ab"]
    links = [f"ls{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        end(names)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}".strip())
    yield names
    end(names)


def end(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


def start(program: Program, spaces: list[str], *words: str) -> list[Running]:
    point = f"rendezvous={ADDRESSES[0]}:{free_port()}"
    return [
        start_one(
            program,
            "n_hosts=2",
            f"host_rank={host}",
            point,
            *words,
            folder=name,
            host=host,
            through=("ip", "netns", "exec", name),
        )
        for host, name in enumerate(spaces)
    ]


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_hosts_who_listen_where_they_said_alone(
    program: Program, spaces: list[str]
) -> None:
    running = start(program, spaces, "n_epochs=100000", "devices=[cpu]", f"timeout={round(limit(6))}")
    running[0].wait_for_text("epoch 1 step 2/6")
    assert [listened_on(each) for each in running] == [{address} for address in ADDRESSES]
    since = time.monotonic()
    ip("-n", spaces[0], "link", "set", f"ls{os.getpid()}a", "down")
    for each, words in zip(
        running,
        (
            "host 1: its launcher has sent no heartbeat",
            "host 0: its launcher, which has the store, has not",
        ),
        strict=True,
    ):
        assert each.wait(40) == 1, each.output()
        assert each.last_line().startswith(f"lockstep: {words}"), each.output()
        each.assert_nothing_left()
    assert time.monotonic() - since < limit(40)


@pytest.mark.slow
def test_a_host_that_goes_away_is_missed_by_the_other(program: Program, spaces: list[str]) -> None:
    """All of its processes at once, and not a packet to say so."""
    running = start(program, spaces, "n_epochs=100000", "devices=[cpu]", f"timeout={round(limit(6))}")
    running[0].wait_for_text("epoch 1 step 2/6")
    ip("-n", spaces[1], "link", "set", f"ls{os.getpid()}b", "down")
    for pid in running[1].leftovers():
        os.kill(pid, signal.SIGKILL)
    assert running[0].wait(40) == 1, running[0].output()
    assert running[0].last_line().startswith("lockstep: host 1: its launcher has sent no heartbeat")
