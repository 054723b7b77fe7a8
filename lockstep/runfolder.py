"""A run's folder, and finding the checkpoint that a run goes on from. Nothing here needs torch.

    runs/<name>/config.yaml                     the resolved configuration, readable by --config
    runs/<name>/log.jsonl                       one JSON line for every line of progress
    runs/<name>/checkpoints/<at>.safetensors    weights, momenta, buffers
    runs/<name>/checkpoints/<at>.json           everything else, and the checksum of the file above
    runs/<name>/checkpoints/latest              the name of the newest, <at>

The JSON file is written after the tensors and is what makes a checkpoint exist; `latest` follows. Each
appears by a rename, so that whatever is killed at whatever moment, all that has a name is whole.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.batches import publish
from lockstep.config import Config
from lockstep.errors import UserError

LATEST = "latest"


@dataclass(frozen=True)
class State:
    """What a checkpoint knows besides tensors.

    `position` samples of `epoch` (1 is the first) have been trained on; `val_record` has one entry per epoch
    that has been validated: epoch, loss, error_top1, error_top5.
    """

    epoch: int
    position: int
    n_samples: int
    learning_rate: float
    val_record: list[dict[str, float]]
    n_trainers: int
    config: dict[str, Any]
    versions: dict[str, str]
    sha256: str = ""

    @property
    def name(self) -> str:
        """'epoch_0005', or 'epoch_0005_at_1024' where the epoch's training or validation is not complete."""
        complete = len(self.val_record) == self.epoch
        return f"epoch_{self.epoch:04d}" + ("" if complete else f"_at_{self.position}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the file of its tensors, and its state."""

    path: Path
    state: State


@dataclass(frozen=True)
class Run:
    """Where a run writes, and what it goes on from (None: from scratch)."""

    folder: Path
    start: Checkpoint | None
    notices: tuple[str, ...] = ()


def open_run(config: Config) -> Run:
    """Makes a new run's folder, or finds the one to go on in.

    Raises UserError rather than touch another run's files.
    """
    if not config.resume_train:
        name = config.run_name or f"{config.model}-{datetime.now():%Y%m%d-%H%M%S}"
        return Run(_make_folder(Path(config.weights_dir) / name), None)
    folder = _folder_to_resume(config)
    start, notices = find_checkpoint(folder, config.load_epoch)
    _check_same_run(config, start)
    if start.state.epoch >= config.n_epochs and len(start.state.val_record) >= config.n_epochs:
        raise UserError(f"{folder}: all {config.n_epochs} epochs are done; raise n_epochs to go on")
    if any(_place(other) > _place(start.path) for other in _records(folder)):
        # Going on from an older checkpoint in place would overwrite the newer ones.
        branch = _make_folder(folder.with_name(f"{folder.name}-from-{start.state.name}"))
        return Run(branch, start, (*notices, f"{folder} has newer checkpoints; this run goes to {branch}"))
    return Run(folder, start, tuple(notices))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process; the lock goes with the process, however it ends."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another run is writing there now") from None
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a small file; it appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    publish(temporary, path)


def record(tensors: Path, state: State) -> None:
    """Makes a checkpoint exist whose tensors are written, and points `latest` at it."""
    write_text(tensors.with_suffix(".json"), json.dumps(asdict(state), indent=1))
    write_text(tensors.with_name(LATEST), tensors.stem + "\n")


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_checkpoint(folder: Path, load_epoch: int | str) -> tuple[Checkpoint, list[str]]:
    """The checkpoint of an epoch, or the newest valid one ('latest'), and notices about those passed over.

    Raises UserError where there is none, or the one asked for is not whole.
    """
    if isinstance(load_epoch, int):
        path = folder / "checkpoints" / f"epoch_{load_epoch:04d}.json"
        if not path.exists():
            there = ", ".join(record.stem for record in _records(folder)) or "none"
            raise UserError(f"{folder}: has no checkpoint of epoch {load_epoch} (there are: {there})")
        return read_checkpoint(path), []
    notices: list[str] = []
    for path in reversed(_records(folder)):
        try:
            return read_checkpoint(path), notices
        except UserError as error:
            notices.append(f"passing over a checkpoint: {error}")
    raise UserError("; ".join([f"{folder}: has no whole checkpoint to resume from", *notices]))


def read_checkpoint(record: Path) -> Checkpoint:
    """Reads and verifies one checkpoint by its JSON file.

    Raises UserError naming the file that is not whole.
    """
    try:
        state = State(**json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{record}: is not a whole checkpoint record: {error}") from error
    tensors = record.with_suffix(".safetensors")
    if not tensors.exists():
        raise UserError(f"{tensors}: is missing")
    if checksum(tensors) != state.sha256:
        raise UserError(f"{tensors}: is damaged or half written: its checksum is not the recorded one")
    return Checkpoint(tensors, state)


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
        (path / "checkpoints").mkdir()
    except FileExistsError:
        raise UserError(
            f"{path}: is there already; resume_train=True goes on with it, another run_name leaves it alone"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: can't be made: {error.strerror} (weights_dir in the config)") from error
    return path


def _folder_to_resume(config: Config) -> Path:
    parent = Path(config.weights_dir)
    if config.run_name is not None:
        folder = parent / config.run_name
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such run to resume")
        return folder
    pointers = sorted(parent.glob(f"*/checkpoints/{LATEST}"), key=os.path.getmtime)
    if not pointers:
        raise UserError(f"{parent}: holds no run with a checkpoint to resume")
    return pointers[-1].parent.parent


def _check_same_run(config: Config, start: Checkpoint) -> None:
    """What a checkpoint can't go on with: another network, other randomness, another order in mid-epoch."""
    keys = ["model", "model_args", "seed"]
    if 0 < start.state.position < start.state.n_samples:
        keys += ["shuffle", "shuffle_block"]
    now = asdict(config)
    for key in keys:
        if now[key] != start.state.config[key]:
            raise UserError(
                f"{start.path}: was made with {key}: {start.state.config[key]}, "
                f"the configuration has {now[key]}"
            )


def _records(folder: Path) -> list[Path]:
    """The JSON files of all checkpoints, oldest position first."""
    return sorted((folder / "checkpoints").glob("epoch_*.json"), key=_place)


def _place(path: Path) -> tuple[int, float]:
    epoch, _, position = path.stem.removeprefix("epoch_").partition("_at_")
    try:
        return int(epoch), int(position) if position else float("inf")
    except ValueError:
        raise UserError(f"{path}: is not the name of a checkpoint") from None
