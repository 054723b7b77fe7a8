"""Messages between the launchers of several hosts, which they exchange through keys of the store.

They are recorded from two hosts that join a run, in which host 0 sends the other a checkpoint. Then each host
joins once more with the recorded messages of the other one, some of them damaged.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import quote, unquote

import torch

from lockstep.config import Config, Layer, resolve
from lockstep.errors import PeerProblem, UserError
from lockstep.hosts import agreement, rendezvous
from lockstep.hosts.addresses import check_reachable
from lockstep.hosts.agreement import AttemptEnd, describe_losses, exchange_ends, newest_common
from lockstep.hosts.heartbeat import Heartbeat, Seen
from lockstep.hosts.rendezvous import Rendezvous, exit_code
from lockstep.hosts.store import Store
from lockstep.launch.hosting import MultiHost
from lockstep.runs import checkpoint
from lockstep.runs.plan import HostConnection
from lockstep.runs.state import State
from lockstep.signals import Interrupts

N_TRAIN = 90
_FACTS = {"seed": 1, "lr_step": [2, 4], "version of torch": "2", "trainers per host": 1}


_WELL = mock.create_autospec(Heartbeat, instance=True)  # sees no other host fail
_WELL.problem.return_value = None


class Remembered(Store):
    """A store without a server. `values` are those present, `kept` those ever present, by key."""

    def __init__(self, values: dict[str, bytes], kept: dict[str, bytes], prefix: str = "") -> None:
        self._values, self._kept, self._prefix = values, kept, prefix

    def within(self, prefix: str) -> "Remembered":
        return Remembered(self._values, self._kept, f"{self._prefix}{prefix}/")

    def put_bytes(self, key: str, content: bytes) -> None:
        self._values[self._prefix + key] = self._kept[self._prefix + key] = content

    def look_bytes(self, key: str) -> bytes | None:
        return self._values.get(self._prefix + key)

    def remove(self, key: str) -> None:
        self._values.pop(self._prefix + key, None)


class _Host(MultiHost):
    """A host without heartbeats, which need a thread."""

    def __init__(self, of_host: Rendezvous, seconds: float) -> None:
        self.rendezvous, self.host, self._timeout, self.writes = of_host, of_host.host, seconds, True


def make_words(folder: Path) -> None:
    """Write a file per key of both hosts, and host 0's run in its own weights_dir."""
    keep_checkpoint(folder / "host0/run")
    kept: dict[str, bytes] = {}
    store = Remembered({}, kept)
    with tempfile.TemporaryDirectory() as other, _alike(), ThreadPoolExecutor(2) as pool:
        places = folder / "host0", Path(other)
        both = [pool.submit(take_part, host, store, places[host], 60.0) for host in (0, 1)]
        for each in both:
            each.result()
    for key, content in kept.items():
        (folder / f"{quote(key, safe='')}.json").write_bytes(content)


def keep_checkpoint(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    record = [{"epoch": 1, "loss": 2.0, "error_top1": 0.5, "error_top5": 0.1}]
    state = State.now(1, N_TRAIN, N_TRAIN, 0.1, record, 1, config_of(0, folder.parent, 1.0))
    checkpoint.save(folder, {"weights/a": torch.ones(3, 2)}, state)
    (folder / "config.yaml").write_text("seed: 1\n")


def config_of(host: int, weights_dir: Path, seconds: float) -> Config:
    keys = {
        "n_hosts": 2,
        "host_rank": host,
        "rendezvous": "127.0.0.1:29500",
        "run_name": "run",
        "devices": ["cpu"],
    }
    config = resolve([Layer("test", {**keys, "resume_train": True, "weights_dir": str(weights_dir)})])[0]
    return dataclasses.replace(config, timeout=seconds)


def take_part(host: int, store: Store, weights_dir: Path, seconds: float) -> None:
    """Read all messages of the other launcher, from the first to the last."""
    until = rendezvous.time.monotonic() + seconds
    farewell = rendezvous._Farewell(host, Interrupts())
    if host == 0:
        name = rendezvous._invite(store, 2, until, farewell)
    else:
        name = rendezvous._answer(store, 1, 2, until, farewell)
    config = config_of(host, weights_dir, seconds)
    connection = HostConnection(("127.0.0.1", 29500), name, "10.0.0.7")
    of_host = Rendezvous(2, host, connection, store.within(name), Interrupts())
    launcher = _Host(of_host, seconds)
    addresses = of_host.gather("address", "10.0.0.7", seconds)
    check_reachable(addresses)
    rendezvous.places(of_host, addresses, 4711, seconds)
    launcher.bring_checkpoint(config)
    agreement.agree(of_host, _FACTS, seconds)
    with launcher.open_run(config, N_TRAIN).lock:
        of_host.put("life", {"count": 1, "at": "epoch 1, step 2: exchanging"})
        of_host.put("bye", True)
        own = AttemptEnd(
            "lost", 0, "trainer 0", "trainer 0 (pid 4711) was killed", 3, ((1, 8, 0), (1, 16, 0))
        )
        ends = exchange_ends(of_host, _WELL, 0, own, seconds)
        assert "\n" not in describe_losses(ends) and newest_common(ends) in (None, *own.moments)
        seen = Seen()
        for _ in range(2):
            seen.look(of_host.store, 1 - host)
        of_host.put("end", {"code": 0, "text": "", "failed": False})
        assert "\n" not in seen.doing
        assert 0 <= exit_code(seen.end) < 256


def hear_words(folder: Path) -> None:
    """Let each host read the other's messages. Raises a UserError of one line if one is invalid."""
    words = {unquote(path.stem): path.read_bytes() for path in folder.glob("*.json")}
    try:
        for host in (0, 1):
            with tempfile.TemporaryDirectory(dir=folder) as other, _alike():
                place = Path(other) if host else folder / "host0"
                take_part(host, Remembered(dict(words), {}), place, 0.0)
    except (UserError, PeerProblem) as error:
        assert "\n" not in str(error) and len(str(error)) < 3000, f"an error is no line: {error}"
        raise UserError(str(error)) from error


@contextmanager
def _alike() -> Iterator[None]:
    """Make launchers draw the same numbers each time, and wait for nothing."""
    times = {"LOOK_SECONDS": 0.0, "FAREWELL_SECONDS": 0.0}
    with mock.patch.multiple(rendezvous, **times), mock.patch("secrets.token_hex", lambda n: "1a" * n):
        yield
