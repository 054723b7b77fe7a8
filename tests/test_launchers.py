"""How launchers of several hosts come together: late, twice, never, among strangers; what listens where."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Program, Running, make_config
from limits import limit
from two_hosts import end_well, free_port, start

from campaigns.watching import processes_of_session
from lockstep.errors import UserError
from lockstep.hosts.addresses import listen
from lockstep.hosts.meeting import HostFailed, Meeting, meet
from lockstep.hosts.store import Store

RUBBISH = (b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 100, b"\xff" * 5000, b"\x80\x04\x95pickle", b"")


def come_together(
    hosts: list[int], port: int, seconds: float = 10, n_hosts: int | None = None, own_store: bool = True
) -> list[Meeting | UserError]:
    """What becomes of launchers with these host numbers, who all come at once."""

    def come(host: int) -> Meeting | UserError:
        try:
            point = f"127.0.0.1:{port}"
            return meet(n_hosts or len(hosts), host, point, None, limit(seconds), own_store)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(come, hosts))


def meetings(found: list[Meeting | UserError]) -> list[Meeting]:
    good = [each for each in found if isinstance(each, Meeting)]
    assert len(good) == len(found), found
    return good


def bother(port: int, until: threading.Event) -> None:
    """Strangers that connect, say something and go, or stay."""
    staying = []
    while not until.wait(0.02):
        for words in RUBBISH:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), 1)
                stranger.sendall(words)
            except OSError:
                continue
            staying.append(stranger)
    for stranger in staying:
        stranger.close()


def test_hosts_meet_among_strangers_and_tell_each_other_what_they_will() -> None:
    port, over = free_port(), threading.Event()
    stranger = threading.Thread(target=bother, args=(port, over))
    stranger.start()
    try:
        found = meetings(come_together([2, 0, 1], port))
        assert len({each.joint.prefix for each in found}) == 1
        with ThreadPoolExecutor(3) as pool:
            told = list(pool.map(lambda each: each.gather("number", each.host**2, limit(10)), found))
        assert told == [[0, 1, 4]] * 3
    finally:
        over.set()
        stranger.join()


def test_what_an_earlier_start_left_in_the_store_counts_for_nothing() -> None:
    """torchrun's store stays: hosts come again, under other numbers, with the old words still there."""
    port = free_port()
    store = Store.serve(listen(("127.0.0.1", port)))
    first = meetings(come_together([0, 1], port, own_store=False))
    first[1].put("number", "old")
    again = meetings(come_together([0, 1], port, own_store=False))
    assert again[0].joint.prefix == again[1].joint.prefix != first[0].joint.prefix
    assert again[0].look("number", 1) is None
    again[1].put("end", {"code": 2, "text": "host 1: has had enough"})
    with pytest.raises(HostFailed, match="host 1: has had enough") as caught:
        again[0].get("number", limit(10), 1)
    assert caught.value.code == 2
    store.remove("invitation")


@pytest.mark.parametrize(
    ("hosts", "n_hosts", "said"),
    [
        ([0, 1], 3, ["host 2 has not come", "host 2 has not come"]),
        ([0], 3, ["host 1 and host 2 have not come"]),
        ([1], 2, ["host 0 has not come"]),
        ([0, 1, 1], 3, ["host 2 has not come", "host", "host"]),
    ],
)
def test_who_does_not_come_is_named_by_all_who_have(hosts: list[int], n_hosts: int, said: list[str]) -> None:
    found = come_together(hosts, free_port(), 1, n_hosts)
    for error, words in zip(found, said, strict=True):
        assert isinstance(error, UserError) and str(error).startswith("meeting_point: "), error
        assert words in str(error) and "\n" not in str(error)


def test_hosts_that_disagree_on_their_number_say_so() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        three = pool.submit(come_together, [0], port, 2, 3)
        two = pool.submit(come_together, [1], port, 2, 2)
        assert "hosts: 2 on host 1, 3 on host 0" in str(two.result()[0])
        assert isinstance(three.result()[0], UserError)


def answer_with(words: bytes) -> Callable[[socket.socket], None]:
    def serve(listener: socket.socket) -> None:
        try:
            while True:
                caller, _ = listener.accept()
                caller.sendall(words)
        except OSError:
            return

    return serve


@pytest.mark.parametrize("words", [b"", b"220 mail.example.org ESMTP\r\n" * 50], ids=["silent", "mail"])
def test_another_program_at_the_meeting_point_is_no_store(words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_with(words), args=(listener,), daemon=True).start()
        begin = time.monotonic()
        (error,) = come_together([1], listener.getsockname()[1], 1, 2)
        assert "host 0 has not come to 127.0.0.1:" in str(error)
        assert time.monotonic() - begin < limit(20)
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("192.0.2.7:29500", "is no address of this host"),
        ("0.0.0.0:29500", "must be one address of host 0's"),
        ("nowhere.invalid:29500", "is no address that is known here"),
        ("127.0.0.1:{taken}", "is in use"),
    ],
)
def test_a_meeting_point_that_is_not_ours_to_bind_is_refused(point: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        point = point.format(taken=listener.getsockname()[1])
        with pytest.raises(UserError, match=words) as caught:
            meet(2, 0, point, None, limit(2), True)
    assert str(caught.value).startswith("meeting_point: ") and point.split(":")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"host": 0}, "host"),
        ({"meeting_point": "127.0.0.1:29500"}, "meeting_point"),
        ({"wire": "bfloat16"}, "wire"),
        ({"hosts": 2, "host": 2, "meeting_point": "127.0.0.1:29500", "run_name": "x"}, "host"),
        ({"hosts": 2, "host": 0, "run_name": "x"}, "meeting_point"),
        ({"hosts": 2, "host": 0, "meeting_point": "127.0.0.1", "run_name": "x"}, "meeting_point"),
        ({"hosts": 2, "host": 0, "meeting_point": "::1:29500", "run_name": "x"}, "meeting_point"),
        ({"hosts": 2, "host": 0, "meeting_point": "127.0.0.1:29500"}, "run_name"),
    ],
)
def test_keys_that_need_others_or_are_no_address_are_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(UserError, match=f"^test: {key} |^default: {key} "):
        make_config(**values)


def listened_on(running: list[Running]) -> set[str]:
    """Addresses on which processes of these sessions accept connections over a network."""
    pids = [pid for each in running for pid in processes_of_session(each.process.pid)]
    inodes = {link for pid in pids for link in links_of(pid)}
    found = set()
    for line in [*read_lines("/proc/net/tcp"), *read_lines("/proc/net/tcp6")]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            found.add(address_of(words[1].split(":")[0]))
    return found


def links_of(pid: int) -> list[str]:
    try:
        return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it leaves just now
        return []


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:] if Path(path).exists() else []


def address_of(text: str) -> str:
    """As the kernel writes it in /proc/net: words of 32 bits in the machine's order."""
    if len(text) == 8:
        return socket.inet_ntop(socket.AF_INET, bytes.fromhex(text)[::-1])
    words = [bytes.fromhex(text[first : first + 8])[::-1] for first in range(0, 32, 8)]
    return socket.inet_ntop(socket.AF_INET6, b"".join(words))


def test_a_run_listens_where_it_was_told_alone_and_goes_on_among_strangers(program: Program) -> None:
    port, over = free_port(), threading.Event()
    running = start(program, "n_epochs=8", "snapshot_freq=8", port=port)
    for each in running:
        each.pids()
    running[0].wait_for_text("epoch 1 step 2/3")
    stranger = threading.Thread(target=bother, args=(port, over))
    stranger.start()
    assert listened_on(running) == {"127.0.0.1"}
    end_well(running)
    over.set()
    stranger.join()
    for each in running:
        assert each.last_line().startswith("done: ")
        each.assert_nothing_left()
