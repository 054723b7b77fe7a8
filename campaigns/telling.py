"""What lies in the store of several hosts under the keys of their launchers: all that one host has told.

Recorded from two hosts that come together, of which host 0 sends the other a checkpoint. Then each of them
takes part once more, with the recorded words of the other one, some of which are bad.
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
from lockstep.hosts import agreement, meeting
from lockstep.hosts.addresses import check_reachable
from lockstep.hosts.endings import exit_code
from lockstep.hosts.life import Seen
from lockstep.hosts.meeting import Meeting
from lockstep.hosts.store import Store
from lockstep.interrupts import Interrupts
from lockstep.launch.hosting import Together
from lockstep.runs import checkpoint
from lockstep.runs.folder import State
from lockstep.runs.plan import Joint

N_TRAIN = 90
_FACTS = {"seed": 1, "lr_step": [2, 4], "version of torch": "2", "trainers per host": 1}


class Remembered(Store):
    """A store without a server. values: by key; kept: those that were there once, too."""

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


class _Host(Together):
    """Without signs of life, which are a thread's."""

    def __init__(self, of_host: Meeting, seconds: float) -> None:
        self.meeting, self.host, self._deadline, self.writes = of_host, of_host.host, seconds, True


def make_words(folder: Path) -> None:
    """Of both hosts, a file for each key; and host 0's run, which is in its own weights_dir."""
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
        "hosts": 2,
        "host": host,
        "meeting_point": "127.0.0.1:29500",
        "run_name": "run",
        "devices": ["cpu"],
    }
    config = resolve([Layer("test", {**keys, "resume_train": True, "weights_dir": str(weights_dir)})])[0]
    return dataclasses.replace(config, wait_deadline=seconds)


def take_part(host: int, store: Store, weights_dir: Path, seconds: float) -> None:
    """All that a launcher reads of the other's, from its first word to its last one."""
    until = meeting.time.monotonic() + seconds
    farewell = meeting._Farewell(host, Interrupts())
    if host == 0:
        name = meeting._invite(store, 2, until, farewell)
    else:
        name = meeting._answer(store, 1, 2, until, farewell)
    config = config_of(host, weights_dir, seconds)
    of_host = Meeting(2, host, Joint(("127.0.0.1", 29500), name, "10.0.0.7"), store.within(name))
    launcher = _Host(of_host, seconds)
    addresses = of_host.gather("address", "10.0.0.7", seconds)
    check_reachable(addresses)
    meeting.places(of_host, addresses, 4711, seconds)
    launcher.bring_checkpoint(config)
    agreement.agree(of_host, _FACTS, seconds)
    with launcher.open_run(config, N_TRAIN).lock:
        of_host.put("life", {"count": 1, "at": "epoch 1, step 2: exchanging"})
        of_host.put("bye", True)
        seen = Seen()
        for _ in range(2):
            seen.look(of_host.store, 1 - host)
        of_host.put("end", {"code": 0, "text": "", "failed": False})
        assert "\n" not in seen.doing
        assert 0 <= exit_code(seen.end) < 256


def hear_words(folder: Path) -> None:
    """Each host hears the other's words. Raises UserError in one line, where they are no good."""
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
    """Launchers draw the same numbers each time, and nobody waits."""
    times = {"LOOK_SECONDS": 0.0, "FAREWELL_SECONDS": 0.0}
    with mock.patch.multiple(meeting, **times), mock.patch("secrets.token_hex", lambda n: "1a" * n):
        yield
