"""Runs' folders of several hosts: which of them are one and the same, and checkpoints sent where they lack.

Each host keeps a run's checkpoints in its own weights_dir, so each can be the one that comes back, alone or
under another number. Where a run goes on, the host with the newest whole checkpoint sends it to all that have
another, in pieces through the store; its checksum says that it has come whole.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.files import checksum, publish, write_text
from lockstep.hosts.meeting import Meeting
from lockstep.hosts.told import as_record, refusal
from lockstep.runs.folder import Checkpoint, State, find_checkpoint, read_state, record

_NAME = re.compile(r"epoch_\d{1,19}(_at_\d{1,19})?", re.ASCII)
PIECE = 4 << 20  # bytes; the store takes 8 MiB
_AHEAD = 2  # pieces that are in the store at once
_SOON = 0.005  # seconds between two looks for a piece


@dataclass(frozen=True)
class Newest:
    """A host's newest whole checkpoint: where in the training it is, its name and its tensors' checksum."""

    epoch: int
    position: int  # in the epoch; the largest of all where that is complete
    name: str
    sha256: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Newest":
        state = checkpoint.state
        position = state.position if "_at_" in state.name else sys.maxsize
        return cls(state.epoch, position, state.name, state.sha256)


@dataclass(frozen=True)
class _Sent:
    """What goes before a checkpoint's pieces: its record, the run's config.yaml or '', the bytes to come."""

    state: dict[str, Any]
    config: str
    size: int


def is_shared(meeting: Meeting, weights_dir: Path, seconds: float) -> bool:
    """Whether this host's weights_dir is host 0's, by a token that host 0 leaves there meanwhile.

    Raises UserError where host 0 can't write there.
    """
    token = weights_dir / f".host0-{meeting.joint.prefix}"
    try:
        if meeting.host == 0:
            weights_dir.mkdir(parents=True, exist_ok=True)
            token.touch()
        meeting.put("token", True)
        meeting.get("token", seconds, 0)
        shared = meeting.host > 0 and token.exists()
        meeting.gather("shared", shared, seconds)
    except OSError as error:
        raise UserError(f"{weights_dir}: can't be written to: {error.strerror} (weights_dir)") from error
    finally:
        if meeting.host == 0:
            token.unlink(missing_ok=True)
    return shared


def bring_newest(meeting: Meeting, config: Config, shared: bool) -> str:
    """Has all hosts have the newest whole checkpoint that one of them has. Returns a line about it, or ''.

    All hosts call it at once; one that shares host 0's folder only looks on. Raises UserError where hosts
    have different checkpoints of the same moment, or one can't be written.
    """
    folder = Path(config.weights_dir) / str(config.run_name)
    mine = _find(folder)
    told = vars(Newest.of(mine)) if mine else {}
    found = meeting.gather("newest", told, config.wait_deadline)
    sharing = meeting.gather("shares", shared, config.wait_deadline)
    known = {host: _read(each, host) for host, each in enumerate(found)}
    there = {host: newest for host, newest in known.items() if newest is not None}
    if not there:
        return ""
    sender = max(there, key=lambda host: (there[host].epoch, there[host].position, -host))
    newest = there[sender]
    for host, other in there.items():
        if other.name == newest.name and other.sha256 != newest.sha256:
            raise UserError(
                f"run_name: host {sender} and host {host} have different checkpoints {newest.name} of "
                f"{config.run_name}: they are of different runs; move one away or take another run_name"
            )
    receivers = [host for host, shares in enumerate(sharing) if not shares and known[host] != newest]
    if not receivers:
        return ""
    if meeting.host == sender and mine is not None:
        _send(meeting, mine, folder, receivers, config.wait_deadline)
    elif meeting.host in receivers:
        _receive(meeting, newest, folder, sender, config.wait_deadline)
    meeting.gather("brought", True, config.wait_deadline)
    names = " and ".join(f"host {host}" for host in receivers)
    return f"host {sender} has the newest checkpoint, {newest.name}, and has sent it to {names}"


def _find(folder: Path) -> Checkpoint | None:
    try:
        return find_checkpoint(folder, "latest")[0]
    except UserError:  # none, or none that is whole; open_run says more where that is wrong
        return None


def _read(told: dict[str, Any], host: int) -> Newest | None:
    if not told:
        return None
    newest = as_record(Newest, told, host, "newest")
    if not _NAME.fullmatch(newest.name):
        raise refusal(host, "newest", told)
    return newest


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _send(
    meeting: Meeting, checkpoint: Checkpoint, folder: Path, receivers: list[int], seconds: float
) -> None:
    path, store = checkpoint.path, meeting.store
    saved = folder / "config.yaml"
    try:
        state = json.loads(path.with_suffix(".json").read_text())
        config = saved.read_text(encoding="utf-8") if saved.exists() else ""
        meeting.put("record", vars(_Sent(state, config, path.stat().st_size)))
        for number, piece in enumerate(_pieces(path)):
            _await_taken(meeting, receivers, number - _AHEAD, seconds)
            store.put_bytes(f"piece/{number}", piece)
        n_pieces = -(-path.stat().st_size // PIECE)
        _await_taken(meeting, receivers, n_pieces - 1, seconds)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error


def _await_taken(meeting: Meeting, receivers: list[int], number: int, seconds: float) -> None:
    """Until all have taken the piece of this number, which then leaves the store."""
    if number < 0:
        return
    for host in receivers:
        meeting.wait(
            lambda host=host: _has_taken(meeting.look("taken", host), number),  # type: ignore[misc]
            seconds,
            host,
            f"taken piece {number} of the checkpoint",
            _SOON,
        )
    meeting.store.remove(f"piece/{number}")


def _has_taken(told: Any, number: int) -> bool | None:
    """None where it has not yet, as `wait` wants it."""
    return True if type(told) is int and told > number else None


def _receive(meeting: Meeting, newest: Newest, folder: Path, sender: int, seconds: float) -> None:
    told = as_record(_Sent, meeting.get("record", seconds, sender), sender, "record")
    path = folder / "checkpoints" / f"{newest.name}.safetensors"
    temporary = path.with_name(f".{path.name}.tmp")
    description = temporary.with_suffix(".json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        description.write_text(json.dumps(told.state))
        state = _read_record(description, sender)
        if (state.name, state.sha256) != (newest.name, newest.sha256):
            raise refusal(sender, "record", told.state)
        with open(temporary, "wb") as file:
            for number in range(-(-told.size // PIECE)):
                file.write(_take(meeting, number, sender, seconds))
                meeting.put("taken", number + 1)
        if checksum(temporary) != newest.sha256:
            raise UserError(f"{path}: has come damaged from host {sender}: its checksum is another")
        if told.config and not (folder / "config.yaml").exists():
            write_text(folder / "config.yaml", told.config)
        publish(temporary, path)
        record(path, state)
    except UnicodeEncodeError as error:
        raise refusal(sender, "record", ascii(told.config)) from error
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from error
    finally:
        for leftover in (temporary, description):
            leftover.unlink(missing_ok=True)


def _read_record(path: Path, sender: int) -> State:
    try:
        return read_state(path)
    except UserError as error:  # which names a file that is about to go
        raise refusal(sender, "record", str(error).removeprefix(f"{path}: ")) from error


def _take(meeting: Meeting, number: int, sender: int, seconds: float) -> bytes:
    key, what = f"piece/{number}", f"sent piece {number} of its checkpoint"
    return meeting.wait(lambda: meeting.store.look_bytes(key), seconds, sender, what, _SOON)
