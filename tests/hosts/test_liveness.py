"""A launcher that ends without an exit record is noticed at once; one that can't be reached is named."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from conftest import wait_until
from limits import limit
from two_hosts import free_port

from lockstep.config.hosts import address_and_port
from lockstep.errors import UserError
from lockstep.hosts.addresses import listen
from lockstep.hosts.heartbeat import Heartbeat
from lockstep.hosts.rendezvous import LivenessConnections, join_rendezvous, serve
from lockstep.hosts.store import HostFailed, Store
from lockstep.signals import Interrupts

COMES_AND_STAYS = """
import sys, time
from lockstep.hosts.rendezvous import join_rendezvous, serve
from lockstep.signals import Interrupts
here = join_rendezvous(2, int(sys.argv[1]), sys.argv[2], None, float(sys.argv[3]), Interrupts(), None)
print("is here", flush=True)
time.sleep(1000)
"""


@pytest.fixture(params=[1, pytest.param(0, marks=pytest.mark.slow)])
def other(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A launcher in another process, its host rank, and the rendezvous, whose store is in this process."""
    point = f"127.0.0.1:{free_port()}"
    store = Store.serve(listen(address_and_port(point)))
    words = [sys.executable, "-c", COMES_AND_STAYS, str(request.param), point, str(limit(30))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, request.param, point
        finally:
            process.kill()
    store.remove("invitation")


def test_a_launcher_that_is_killed_is_missed_at_once_by_all_who_met_it(
    other: tuple[subprocess.Popen[str], int, str],
) -> None:
    """A host that waits for its value notices, and one that only watches. The launcher does not hang."""
    process, victim, point = other
    here = join_rendezvous(2, 1 - victim, point, None, limit(30), Interrupts())
    heartbeat = Heartbeat(here, lambda: "its dataset", limit(60))
    assert process.stdout and process.stdout.readline() == "is here\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.get, "number", limit(60), victim)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        assert not waiting.done() and heartbeat.problem() is None
        since = time.monotonic()
        process.kill()
        gone = f"host {victim}: its launcher has exited; "
        with pytest.raises(HostFailed, match=f"^{gone}it has not sent its number$"):
            waiting.result()
    wait_until(heartbeat.problem, "the watch to see it, too")
    assert str(heartbeat.problem()) == f"{gone}it was at: starting"
    assert time.monotonic() - since < limit(5)
    heartbeat.leave()


def test_a_host_that_others_can_not_reach_says_so_before_it_trains() -> None:
    """The case of another machine's address, or of a firewall."""
    point = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(join_rendezvous, 2, host, point, address, limit(10), Interrupts(), served)
            for host, address, served in ((0, "192.0.2.7", serve(point)), (1, "192.0.2.8", None))
        ]
        for each in both:
            with pytest.raises(
                (UserError, HostFailed), match=r"address: this host can't listen at 192\.0\.2"
            ):
                each.result()
    with pytest.raises(HostFailed, match=r"host 1: its launcher has ended, or a firewall is in the way, at"):
        LivenessConnections().hold(1, ("127.0.0.1", free_port()), limit(5))


def test_strangers_on_a_launchers_port_change_nothing() -> None:
    here, other = LivenessConnections(), LivenessConnections()
    point = "127.0.0.1", here.listen("127.0.0.1")
    strangers = []
    for number in range(200):
        if number == 100:
            other.hold(0, point, limit(5))
        strangers.append(socket.create_connection(point, limit(5)))
        strangers[-1].setblocking(False)
        with suppress(BlockingIOError):  # no process reads it
            strangers[-1].sendall(bytes(1_000_000))
        if number % 2:
            strangers[-1].close()
    assert not other.has_ended(0)
    del here  # as its process's end would
    wait_until(lambda: other.has_ended(0), "the reset")
    assert other.has_ended(0), "it stays so"
    for stranger in strangers:
        stranger.close()
