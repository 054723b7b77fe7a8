"""Run folders of several hosts: which of them are shared, and checkpoints sent to hosts that lack them.

Each host keeps a run's checkpoints in its own weights_dir, so any host can be the one that comes back, with
the others or without, under the same rank or another. When a run resumes, the host with the newest whole
checkpoint sends it in pieces through the store to all hosts that have another one or none. Its checksum
shows that it has arrived whole.
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
from lockstep.files import checksum, publish, remove_useless, write_text
from lockstep.hosts.rendezvous import Rendezvous
from lockstep.hosts.store import as_record, refusal
from lockstep.runs.checkpoint_files import find_checkpoint, read_state, record
from lockstep.runs.state import Checkpoint, State

_NAME = re.compile(r"epoch_\d{1,19}(_at_\d{1,19})?", re.ASCII)
PIECE = 4 << 20  # bytes; the store takes 8 MiB at most
_AHEAD = 2  # pieces that are in the store at once
_LOOK_SECONDS = 0.005  # between two looks for a piece


@dataclass(frozen=True)
class Newest:
    """A host's newest whole checkpoint: its place in the training, its name and its tensors' checksum."""

    epoch: int
    position: int  # in the epoch; the largest number if the epoch is complete
    name: str
    sha256: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Newest":
        """Return the description of a checkpoint of this host."""
        state = checkpoint.state
        position = state.position if "_at_" in state.name else sys.maxsize
        return cls(state.epoch, position, state.name, state.sha256)


@dataclass(frozen=True)
class _Header:
    """The header of a checkpoint's pieces: its record, the run's config.yaml or '', its size in bytes."""

    state: dict[str, Any]
    config: str
    size: int


def is_shared(rendezvous: Rendezvous, weights_dir: Path, seconds: float) -> bool:
    """Return whether this host's weights_dir is host 0's, shown by a token that host 0 leaves there.

    Raises:
        UserError: Host 0 can't write there.
    """
    token = weights_dir / f".host0-{rendezvous.host_connection.prefix}"
    try:
        if rendezvous.host == 0:
            weights_dir.mkdir(parents=True, exist_ok=True)
            token.touch()
        rendezvous.put("token", True)
        rendezvous.get("token", seconds, 0)
        shared = rendezvous.host > 0 and token.exists()
        rendezvous.gather("shared", shared, seconds)
    except OSError as error:
        raise UserError(f"{weights_dir}: can't be written to: {error.strerror} (weights_dir)") from error
    finally:
        if rendezvous.host == 0:
            remove_useless(token)
    return shared


def bring_newest(rendezvous: Rendezvous, config: Config, shared: bool) -> str:
    """Send the newest whole checkpoint of any host to all hosts that lack it. All hosts call it at once.

    Args:
        rendezvous: The hosts of this start.
        config: The run's, for weights_dir, run_name and timeout.
        shared: Whether this host shares host 0's folder; then it neither sends nor receives.

    Returns:
        A line for people, or '' if no checkpoint was sent.

    Raises:
        UserError: Hosts have different checkpoints of the same moment, or a file can't be read or written.
    """
    folder = Path(config.weights_dir) / str(config.run_name)
    mine = _find(folder)
    described = vars(Newest.of(mine)) if mine else {}
    received = rendezvous.gather("newest", described, config.timeout)
    sharing = rendezvous.gather("shares", shared, config.timeout)
    known = {host: _read(each, host) for host, each in enumerate(received)}
    holders = {host: newest for host, newest in known.items() if newest is not None}
    if not holders:
        return ""
    sender = max(holders, key=lambda host: (holders[host].epoch, holders[host].position, -host))
    newest = holders[sender]
    for host, other in holders.items():
        if other.name == newest.name and other.sha256 != newest.sha256:
            raise UserError(
                f"run_name: host {sender} and host {host} have different checkpoints {newest.name} of "
                f"{config.run_name}: they are of different runs; move one away or take another run_name"
            )
    receivers = [host for host, shares in enumerate(sharing) if not shares and known[host] != newest]
    if not receivers:
        return ""
    if rendezvous.host == sender and mine is not None:
        _send(rendezvous, mine, folder, receivers, config.timeout)
    elif rendezvous.host in receivers:
        _receive(rendezvous, newest, folder, sender, config.timeout)
    else:
        _follow(rendezvous, sender, receivers, config.timeout)
    rendezvous.gather("brought", True, config.timeout)
    names = " and ".join(f"host {host}" for host in receivers)
    return f"host {sender} has the newest checkpoint, {newest.name}, and has sent it to {names}"


def _find(folder: Path) -> Checkpoint | None:
    try:
        return find_checkpoint(folder, "latest")[0]
    except UserError:  # none is whole; open_run reports an error where there should be one
        return None


def _read(value: dict[str, Any], host: int) -> Newest | None:
    if not value:
        return None
    newest = as_record(Newest, value, host, "newest")
    if not _NAME.fullmatch(newest.name):
        raise refusal(host, "newest", value)
    return newest


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _send(
    rendezvous: Rendezvous, checkpoint: Checkpoint, folder: Path, receivers: list[int], seconds: float
) -> None:
    path, store = checkpoint.path, rendezvous.store
    saved = folder / "config.yaml"
    try:
        state = json.loads(path.with_suffix(".json").read_text())
        config = saved.read_text(encoding="utf-8") if saved.exists() else ""
        rendezvous.put("record", vars(_Header(state, config, path.stat().st_size)))
        for number, piece in enumerate(_pieces(path)):
            _withdraw(rendezvous, receivers, number - _AHEAD, seconds)
            store.put_bytes(f"piece/{number}", piece)
        n_pieces = -(-path.stat().st_size // PIECE)
        _withdraw(rendezvous, receivers, n_pieces - 1, seconds)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error


def _withdraw(rendezvous: Rendezvous, receivers: list[int], number: int, seconds: float) -> None:
    """Wait until all receivers have taken a piece, then remove it from the store."""
    if number >= 0:
        _await_taken(rendezvous, receivers, number, seconds)
        rendezvous.store.remove(f"piece/{number}")


def _follow(rendezvous: Rendezvous, sender: int, receivers: list[int], seconds: float) -> None:
    """Wait, on a host that neither sends nor receives, for as long as pieces are taken in time."""
    for number in range(-(-_header_of(rendezvous, sender, seconds).size // PIECE)):
        _await_taken(rendezvous, receivers, number, seconds)


def _await_taken(rendezvous: Rendezvous, receivers: list[int], number: int, seconds: float) -> None:
    """Wait until all receivers have taken a piece."""
    for host in receivers:
        rendezvous.wait(
            lambda host=host: _has_taken(rendezvous.look("taken", host), number),  # type: ignore[misc]
            seconds,
            host,
            f"taken piece {number} of the checkpoint",
            _LOOK_SECONDS,
        )


def _has_taken(n_taken: Any, number: int) -> bool | None:
    """Return True if so many pieces include this one, else None, as `wait` expects."""
    return True if type(n_taken) is int and n_taken > number else None


def _header_of(rendezvous: Rendezvous, sender: int, seconds: float) -> _Header:
    return as_record(_Header, rendezvous.get("record", seconds, sender), sender, "record")


def _receive(rendezvous: Rendezvous, newest: Newest, folder: Path, sender: int, seconds: float) -> None:
    header = _header_of(rendezvous, sender, seconds)
    path = folder / "checkpoints" / f"{newest.name}.safetensors"
    temporary = path.with_name(f".{path.name}.tmp")
    description = temporary.with_suffix(".json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        description.write_text(json.dumps(header.state))
        state = _read_record(description, sender)
        if (state.name, state.sha256) != (newest.name, newest.sha256):
            raise refusal(sender, "record", header.state)
        with open(temporary, "wb") as file:
            for number in range(-(-header.size // PIECE)):
                file.write(_take(rendezvous, number, sender, seconds))
                rendezvous.put("taken", number + 1)
        if checksum(temporary) != newest.sha256:
            raise UserError(f"{path}: arrived damaged from host {sender}: its checksum differs. Start again")
        if header.config and not (folder / "config.yaml").exists():
            write_text(folder / "config.yaml", header.config)
        publish(temporary, path)
        record(path, state)
    except UnicodeEncodeError as error:
        raise refusal(sender, "record", ascii(header.config)) from error
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from error
    finally:
        for leftover in (temporary, description):
            remove_useless(leftover)


def _read_record(path: Path, sender: int) -> State:
    try:
        return read_state(path)
    except UserError as error:  # its message names a temporary file
        raise refusal(sender, "record", str(error).removeprefix(f"{path}: ")) from error


def _take(rendezvous: Rendezvous, number: int, sender: int, seconds: float) -> bytes:
    key, what = f"piece/{number}", f"sent piece {number} of its checkpoint"
    return rendezvous.wait(lambda: rendezvous.store.look_bytes(key), seconds, sender, what, _LOOK_SECONDS)
