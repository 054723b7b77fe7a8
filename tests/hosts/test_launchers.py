"""The rendezvous of launchers: late, twice, never, among strangers; and where they listen."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Program, make_config, wait_until
from limits import limit
from two_hosts import end_well, free_port, listened_on, start, start_one, tensors_of

from lockstep.config import Layer, read_run, resolve, to_yaml
from lockstep.errors import UserError
from lockstep.hosts import folders as run_folders
from lockstep.hosts import heartbeat
from lockstep.hosts.addresses import listen
from lockstep.hosts.folders import bring_newest
from lockstep.hosts.heartbeat import Heartbeat
from lockstep.hosts.rendezvous import Rendezvous, join_rendezvous, serve
from lockstep.hosts.store import HostFailed, HostLost, Store
from lockstep.launch.hosting import MultiHost, SingleHost
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint_files import find_checkpoint, records
from lockstep.runs.state import State
from lockstep.signals import Interrupts

RUBBISH = (b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 100, b"\xff" * 5000, b"\x80\x04\x95pickle", b"")


def connect_all_hosts(
    hosts: list[int], port: int, seconds: float = 10, n_hosts: int | None = None, own_store: bool = True
) -> list[Rendezvous | UserError]:
    """Join launchers with these host ranks at the same time; return their results or errors."""

    def come(host: int) -> Rendezvous | UserError:
        try:
            point = f"127.0.0.1:{port}"
            served = serve(point) if own_store and host == 0 else None
            return join_rendezvous(
                n_hosts or len(hosts), host, point, None, limit(seconds), Interrupts(), served
            )
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(come, hosts))


def rendezvous_of(found: list[Rendezvous | UserError]) -> list[Rendezvous]:
    good = [each for each in found if isinstance(each, Rendezvous)]
    assert len(good) == len(found), found
    return good


def bother(port: int, until: threading.Event) -> None:
    """Connect as strangers that send something and leave, or stay."""
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
        found = rendezvous_of(connect_all_hosts([2, 0, 1], port))
        assert len({each.host_connection.prefix for each in found}) == 1
        with ThreadPoolExecutor(3) as pool:
            received = list(pool.map(lambda each: each.gather("number", each.host**2, limit(10)), found))
        assert received == [[0, 1, 4]] * 3
    finally:
        over.set()
        stranger.join()


def test_what_an_earlier_start_left_in_the_store_counts_for_nothing() -> None:
    """torchrun's store stays: hosts join again, with other ranks, while the old values are still stored."""
    port = free_port()
    store = Store.serve(listen(("127.0.0.1", port)))
    first = rendezvous_of(connect_all_hosts([0, 1], port, own_store=False))
    first[1].put("number", "old")
    again = rendezvous_of(connect_all_hosts([0, 1], port, own_store=False))
    assert (
        again[0].host_connection.prefix == again[1].host_connection.prefix != first[0].host_connection.prefix
    )
    assert again[0].look("number", 1) is None
    again[1].put("end", {"code": 2, "text": "host 1: has had enough"})
    with pytest.raises(HostFailed, match="host 1: has had enough") as caught:
        again[0].get("number", limit(10), 1)
    assert caught.value.code == 2
    store.remove("invitation")


def test_a_launcher_that_is_started_again_before_it_sent_its_address_is_lost_at_once() -> None:
    """The others waited 20 s for the address, and the new launcher gave up with a shorter `timeout`."""
    port = free_port()
    point, since = f"127.0.0.1:{port}", time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        served = serve(point)
        here = pool.submit(join_rendezvous, 2, 0, point, None, limit(10), Interrupts(), served, True)
        first = Store.connect(("127.0.0.1", port), limit(10))
        first.put("hello/1", "1" * 16)
        wait_until(lambda: (first.look("invitation") or {}).get("numbers") == {"1": "1" * 16}, "it")
        name = first.look("invitation")["name"]
        first.put(f"{name}/1", "1" * 16)
        wait_until(lambda: first.look(f"{name}/go"), "the start")
        again = pool.submit(join_rendezvous, 2, 1, point, None, limit(10), Interrupts())
        with pytest.raises(HostLost, match="host 1: its launcher was started again; it has not sent its add"):
            here.result()
        assert time.monotonic() - since < limit(5)
        both = [join_rendezvous(2, 0, point, None, limit(10), Interrupts(), served, True), again.result()]
    assert both[0].host_connection.prefix == both[1].host_connection.prefix
    for each in both:
        each.liveness_connections.close()


def test_a_host_that_is_stopped_before_it_trains_tells_the_others() -> None:
    """The signal's handler reports it, just before the launcher leaves."""
    lives = [
        Heartbeat(each, lambda: "its dataset", limit(60))
        for each in rendezvous_of(connect_all_hosts([0, 1], free_port()))
    ]
    assert lives[0].problem() is None
    lives[1].end_now(143, "host 1: was stopped as asked, before training")
    wait_until(lives[0].problem, "the other's word")
    failed = lives[0].problem()
    assert failed and (failed.code, str(failed)) == (143, "host 1: was stopped as asked, before training")
    lives[1].leave()
    lives[0].leave()


def test_host_0_that_is_stopped_before_it_trains_leaves_when_the_others_know() -> None:
    """Its store ends with it: the others took it for a launcher that was killed, and waited for it."""
    here, there = rendezvous_of(connect_all_hosts([0, 1], free_port()))
    first = Heartbeat(here, lambda: "its dataset", limit(60))
    time.sleep(heartbeat.LIFE_SECONDS / 2)
    second = Heartbeat(there, lambda: "its dataset", limit(60))
    first.end_now(143, "host 0: was stopped as asked, before training")
    problem = second.problem()
    assert problem and problem.code == 143
    second.leave()
    first.leave()


def test_a_host_that_does_not_write_waits_for_the_end_of_the_host_that_writes_for_it() -> None:
    """The failure of a third host ends no wait."""
    config, found = make_config(timeout=limit(60)), rendezvous_of(connect_all_hosts([0, 1, 2], free_port()))
    hosts = [MultiHost(each, config, each.interrupts) for each in found]
    hosts[1].writes = hosts[2].writes = False
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(hosts[1].await_writer)
        hosts[2].report_end(1, "host 2: trainer 0 was killed")
        wait_until(hosts[1].heartbeat.problem, "the third host's failure")
        time.sleep(0.2)
        assert not waiting.done()
        hosts[0].report_end(1, "host 0: stopped as asked")
        waiting.result(limit(10))
    hosts[0].await_writer()  # it writes itself
    for host in reversed(hosts):
        host.heartbeat.leave()


@pytest.mark.slow
def test_a_pause_of_this_launcher_is_no_silence_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process seems to stand still for 8 s between two looks at the store."""
    lives = [
        Heartbeat(each, lambda: "its dataset", limit(60))
        for each in rendezvous_of(connect_all_hosts([0, 1], free_port()))
    ]
    wait_until(lambda: lives[0]._others[1].count, "the other's heartbeat")
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr(heartbeat, "time", clock)
    passed[0] = 8.0
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert lives[0].problem(alarmed=True) is None
        time.sleep(0.01)
    for each in reversed(lives):
        each.leave()


def test_a_start_that_loses_a_host_releases_the_runs_folder(tmp_path: Path) -> None:
    """The same launcher opens it again when the host is back, while the error's traceback may live."""

    class Lost:
        def put(self, key: str, value: object) -> None:
            pass

        def get(self, key: str, seconds: float, of_host: int) -> None:
            raise HostLost(1, "host 1: its launcher has exited")

    host = MultiHost.__new__(MultiHost)
    host.host, host.writes, host._timeout, host.rendezvous = 0, True, 1.0, Lost()  # type: ignore[assignment]
    config = make_config(weights_dir=str(tmp_path), run_name="run")
    with pytest.raises(HostLost) as error:
        host.open_run(config, 90)
    with SingleHost().open_run(config, 90).lock:
        assert error.traceback


@pytest.mark.slow
@pytest.mark.parametrize(("leaving", "number"), [(1, signal.SIGINT), (0, signal.SIGTERM)])
def test_a_host_that_is_stopped_at_the_meeting_leaves_at_once_and_is_named(
    program: Program, leaving: int, number: signal.Signals
) -> None:
    """Two of three hosts have joined."""
    port = free_port()
    words = "n_hosts=3", f"rendezvous=127.0.0.1:{port}", "n_epochs=1"
    both = [start_one(program, *words, f"host_rank={host}", folder=str(host), host=host) for host in (0, 1)]
    store = Store.connect(("127.0.0.1", port), limit(30))

    def has_answered() -> bool:
        received = store.look("invitation") or {"numbers": {}}
        number = received["numbers"].get("1")
        return number is not None and store.look(f"{received['name']}/1") == number

    wait_until(has_answered, "both to be there")
    since = time.monotonic()
    both[leaving].process.send_signal(number)
    for each in (both[leaving], both[1 - leaving]):
        assert each.wait(10) == 128 + number, each.output()
        each.assert_nothing_left()
        assert each.output().count("lockstep: ") == 1, each.output()
    assert time.monotonic() - since < limit(5)
    assert both[leaving].last_line() == "lockstep: stopped as asked, before training began"
    assert both[1 - leaving].last_line() == f"lockstep: host {leaving}: was stopped as asked, before training"


@pytest.mark.parametrize(
    ("hosts", "n_hosts", "said"),
    [
        ([0, 1], 3, ["host 2 has not joined", "host 2 has not joined"]),
        pytest.param([0], 3, ["host 1 and host 2 have not joined"], marks=pytest.mark.slow),
        pytest.param([1], 2, ["host 0 has not joined"], marks=pytest.mark.slow),
        pytest.param([0, 1, 1], 3, ["host 2 has not joined", "host", "host"], marks=pytest.mark.slow),
    ],
)
def test_who_does_not_come_is_named_by_all_who_have(hosts: list[int], n_hosts: int, said: list[str]) -> None:
    found = connect_all_hosts(hosts, free_port(), 1, n_hosts)
    for error, words in zip(found, said, strict=True):
        assert isinstance(error, UserError) and str(error).startswith("rendezvous: "), error
        assert words in str(error) and "\n" not in str(error)


@pytest.mark.slow
def test_hosts_that_disagree_on_their_number_say_so() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        three = pool.submit(connect_all_hosts, [0], port, 1, 3)
        two = pool.submit(connect_all_hosts, [1], port, 2, 2)
        assert "hosts: 2 on host 1, 3 on host 0" in str(two.result()[0])
        assert isinstance(three.result()[0], UserError)


def test_a_host_that_would_listen_where_no_other_reaches_it_is_told() -> None:
    """The case of a host name that resolves to 127.0.1.1."""
    point = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(join_rendezvous, 2, host, point, address, limit(10), Interrupts(), served)
            for host, address, served in ((0, "127.0.1.1", serve(point)), (1, "10.0.0.7", None))
        ]
        for each in both:
            with pytest.raises(
                UserError, match=r"address: host 0 would listen on its loopback, 127\.0\.1\.1"
            ):
                each.result()


def answer_with(words: bytes) -> Callable[[socket.socket], None]:
    def serve(listener: socket.socket) -> None:
        try:
            while True:
                caller, _ = listener.accept()
                caller.sendall(words)
        except OSError:
            return

    return serve


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"", id="silent", marks=pytest.mark.slow),
        pytest.param(b"220 mail.example.org ESMTP\r\n" * 50, id="mail"),
    ],
)
def test_another_program_at_the_meeting_point_is_no_store(words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_with(words), args=(listener,), daemon=True).start()
        begin = time.monotonic()
        (error,) = connect_all_hosts([1], listener.getsockname()[1], 0.3, 2)
        assert "host 0 has not joined at 127.0.0.1:" in str(error)
        assert time.monotonic() - begin < limit(20)
        listener.shutdown(socket.SHUT_RDWR)


def keep_checkpoint(folder: Path, epoch: int, value: float) -> None:
    """One of a run in `folder`, whose tensors are all this number."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    entry = {"epoch": 1, "loss": 1.0, "error_top1": 0.5, "error_top5": 0.1}
    state = State.now(epoch, 90, 90, 0.1, [entry] * epoch, 2, make_config())
    checkpoint.save(folder, {"weights": torch.full((3_000_000,), value)}, state)


def bring(folders: list[Path], **values: object) -> list[str | UserError]:
    """Return the line of bring_newest on hosts that have their runs in these folders."""
    found = rendezvous_of(connect_all_hosts(list(range(len(folders))), free_port()))

    def of_host(rendezvous: Rendezvous) -> str | UserError:
        config = make_config(weights_dir=str(folders[rendezvous.host]), run_name="run", **values)
        try:
            return bring_newest(rendezvous, config, False)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(of_host, found))


def test_the_newest_whole_checkpoint_comes_to_all_who_lack_it(tmp_path: Path) -> None:
    """In pieces. Host 0 has an older one and a newer one that is damaged, host 2 has nothing at all."""
    folders = [tmp_path / name for name in "abc"]
    assert bring(folders) == ["", "", ""]
    keep_checkpoint(folders[0] / "run", 1, 1.0)
    keep_checkpoint(folders[0] / "run", 2, 3.0)
    damaged = folders[0] / "run" / "checkpoints" / "epoch_0002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    keep_checkpoint(folders[1] / "run", 2, 2.0)
    (folders[1] / "run" / "config.yaml").write_text("seed: 3")
    said = bring(folders)
    assert said == ["host 1 has the newest checkpoint, epoch_0002, and has sent it to host 0 and host 2"] * 3
    for folder in folders:
        found, notices = find_checkpoint(folder / "run", "latest")
        assert found.state.epoch == 2 and not notices
        assert torch.equal(checkpoint.load(found.path)["weights"], torch.full((3_000_000,), 2.0))
        assert not list(found.path.parent.glob(".*"))
    assert (folders[2] / "run" / "config.yaml").read_text() == "seed: 3"
    assert bring(folders) == ["", "", ""]


@pytest.mark.slow
def test_a_host_that_has_the_checkpoint_waits_for_a_transfer_of_longer_than_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece arrives in time. Host 1 waited `timeout` for all of them, and the start failed."""
    timeout, take = limit(2), run_folders._take

    def take_slowly(*arguments: Any) -> bytes:
        time.sleep(timeout / 5)
        return take(*arguments)

    monkeypatch.setattr(run_folders, "PIECE", 1 << 20)  # 12 of them
    monkeypatch.setattr(run_folders, "_take", take_slowly)
    for name in "ab":
        keep_checkpoint(tmp_path / name / "run", 2, 1.0)
    said = bring([tmp_path / name for name in "abc"], timeout=timeout)
    assert said == ["host 0 has the newest checkpoint, epoch_0002, and has sent it to host 2"] * 3


def test_no_host_gets_a_checkpoint_of_a_run_of_another_name(tmp_path: Path) -> None:
    """Names were compared after the transfer: a mistyped one left a foreign checkpoint in that run."""
    keep_checkpoint(tmp_path / "a" / "one", 2, 1.0)
    keep_checkpoint(tmp_path / "b" / "two", 1, 2.0)

    def of_host(rendezvous: Rendezvous) -> str:
        place, name = (("a", "one"), ("b", "two"))[rendezvous.host]
        config = make_config(weights_dir=str(tmp_path / place), run_name=name, resume_train=True)
        host = MultiHost(rendezvous, config, Interrupts())
        with pytest.raises(UserError) as error:
            host.bring_checkpoint(config)
        host.abandon()
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(of_host, rendezvous_of(connect_all_hosts([0, 1], free_port()))))
    assert said == ["run_name: one on host 0, two on host 1: it has to be the same on all hosts"] * 2
    assert [path.stem for path in records(tmp_path / "b" / "two")] == ["epoch_0001"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The temporary files can't be removed there either, which ended the start with a traceback."""
    (rendezvous,) = rendezvous_of(connect_all_hosts([0], free_port()))
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(UserError, match=f"{place}: can't be written to: File exists"):
        run_folders.is_shared(rendezvous, place, limit(1))
    rendezvous.put("record", {"state": {}, "config": "", "size": 0})
    newest = run_folders.Newest(1, 0, "epoch_0001", "")
    with pytest.raises(UserError, match="can't be written: Not a directory"):
        run_folders._receive(rendezvous, newest, place / "run", 0, limit(1))


def test_different_checkpoints_of_one_moment_are_of_different_runs(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for value, folder in enumerate(folders):
        keep_checkpoint(folder / "run", 1, value)
    for error in bring(folders):
        assert isinstance(error, UserError) and "have different checkpoints epoch_0001 of run" in str(error)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("192.0.2.7:29500", "is no address of this host"),
        ("0.0.0.0:29500", "must be one address, not all of a host's"),
        ("nowhere.invalid:29500", "is no address that is known here"),
        ("127.0.0.1:{taken}", "is in use"),
    ],
)
def test_a_meeting_point_that_is_not_ours_to_bind_is_refused(point: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        point = point.format(taken=listener.getsockname()[1])
        with pytest.raises(UserError, match=words) as caught:
            serve(point)
    assert str(caught.value).startswith("rendezvous: ") and point.split(":")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"host_rank": 0}, "host_rank"),
        ({"rendezvous": "127.0.0.1:29500"}, "rendezvous"),
        ({"network_dtype": "bfloat16"}, "network_dtype"),
        ({"n_hosts": 2, "host_rank": 2, "rendezvous": "127.0.0.1:29500", "run_name": "x"}, "host_rank"),
        ({"n_hosts": 2, "host_rank": 0, "run_name": "x"}, "rendezvous"),
        ({"n_hosts": 2, "host_rank": 0, "rendezvous": "127.0.0.1", "run_name": "x"}, "rendezvous"),
        ({"n_hosts": 2, "host_rank": 0, "rendezvous": "::1:29500", "run_name": "x"}, "rendezvous"),
        ({"n_hosts": 2, "host_rank": 0, "rendezvous": "127.0.0.1:29500"}, "run_name"),
    ],
)
def test_keys_that_need_others_or_are_no_address_are_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(UserError, match=f"^test: {key} |^default: {key} "):
        make_config(**values)


def test_a_run_of_several_hosts_is_read_on_one_without_their_keys(tmp_path: Path) -> None:
    """The keys of hosts are dropped for validate.py, classify.py and a resumed run."""
    keys = {
        "n_hosts": 2,
        "host_rank": 1,
        "rendezvous": "127.0.0.1:29500",
        "run_name": "x",
        "network_dtype": "bfloat16",
    }
    config = make_config(**keys, host_address="127.0.0.1", seed=7)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    single, _ = resolve([read_run(tmp_path / "config.yaml")])
    assert (single.n_hosts, single.host_rank, single.network_dtype, single.seed) == (1, None, "float32", 7)
    both, _ = resolve([read_run(tmp_path / "config.yaml", 2), Layer("test", {**keys, "host_rank": 0})])
    place = both.n_hosts, both.host_rank, both.host_address, both.network_dtype
    assert place == (2, 0, None, "bfloat16")


@pytest.mark.slow
def test_a_run_listens_where_it_was_told_alone_and_goes_on_among_strangers(program: Program) -> None:
    port, over = free_port(), threading.Event()
    running = start(program, "n_epochs=8", "snapshot_freq=8", port=port)
    for each in running:
        each.pids()
    running[0].wait_for_text("epoch 1 step 2/3")
    launcher = running[0].process.pid
    n_descriptors = len(os.listdir(f"/proc/{launcher}/fd")) + 20  # which the strangers will take
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (n_descriptors, n_descriptors))
    stranger = threading.Thread(target=bother, args=(port, over))
    stranger.start()
    wait_until(lambda: len(os.listdir(f"/proc/{launcher}/fd")) == n_descriptors, "strangers to take them all")
    assert [listened_on(each) for each in running] == [{"127.0.0.1"}, {"127.0.0.1"}]
    end_well(running)
    over.set()
    stranger.join()
    for each in running:
        assert each.last_line().startswith("done: ")
        each.assert_nothing_left()


@pytest.mark.slow
def test_hosts_meet_and_train_over_ipv6(program: Program) -> None:
    point = f"rendezvous=[::1]:{free_port()}"
    running = [
        start_one(program, "n_hosts=2", f"host_rank={host}", point, "n_epochs=4", folder=str(host), host=host)
        for host in (0, 1)
    ]
    running[0].wait_for_text("epoch 1 step 2/3")
    assert [listened_on(each) for each in running] == [{"::1"}, {"::1"}]
    end_well(running)
    assert tensors_of(running[0]) == tensors_of(running[1]) != {}
