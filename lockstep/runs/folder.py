"""A run's folder, and finding the checkpoint that a run goes on from. Nothing here needs torch.

    runs/<name>/config.yaml                     the resolved configuration, readable by --config
    runs/<name>/log.jsonl                       one JSON line for every start (with versions), line of
                                                progress, validation, checkpoint and ending
    runs/<name>/checkpoints/<at>.safetensors    weights, momenta, buffers
    runs/<name>/checkpoints/<at>.json           everything else, and the checksum of the file above
    runs/<name>/checkpoints/latest              the name of the newest, <at>
    runs/<name>/tensorboard/                    event files, with tensorboard: true
    runs/<name>/trace/, trace.json              with trace: true, and by `python -m lockstep.trace`
    runs/<name>/postmortem/                     where a loss was not finite: which pictures, and the tensors
    runs/<name>/report.html, report/*.png       written by `python -m lockstep.report`

The JSON file is written after the tensors and is what makes a checkpoint exist; `latest` follows, for people.
Each appears by a rename, so that whatever is killed at whatever moment, all that has a name is whole.
"""

import fcntl
import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.files import checksum, write_text
from lockstep.optim import OPTIMIZERS
from lockstep.optim.schedules import SCHEDULES
from lockstep.runs import versions

_RECORD = re.compile(r"epoch_(\d+)(?:_at_(\d+))?\.json")
# Keys that may differ between a run and its resumption without being worth a word.
_UNREMARKABLE = {"resume_train", "load_epoch", "run_name", "weights_dir", "n_epochs", "devices", "batch_size"}
_UNREMARKABLE |= {"tensorboard", "report", "trace", "host", "meeting_point", "address"}


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

    @classmethod
    def now(
        cls,
        epoch: int,
        position: int,
        n_samples: int,
        learning_rate: float,
        val_record: list[dict[str, float]],
        n_trainers: int,
        config: Config,
    ) -> "State":
        """The state of a run of this program, with the versions of what it is made of."""
        made_with = versions.of_packages()
        return cls(
            epoch, position, n_samples, learning_rate, val_record, n_trainers, asdict(config), made_with
        )

    @property
    def name(self) -> str:
        """'epoch_0005', or 'epoch_0005_at_1024' where the epoch's training or validation is not complete."""
        return f"epoch_{self.epoch:04d}" + ("" if self.is_complete else f"_at_{self.position}")

    @property
    def is_complete(self) -> bool:
        """Whether the epoch has been trained and validated."""
        return len(self.val_record) == self.epoch

    def is_well_formed(self) -> bool:
        """Whether every value is of its type: the file may have been edited."""
        counts = (self.epoch, self.position, self.n_samples, self.n_trainers)
        return (
            all(type(count) is int and 0 <= count < 1 << 63 for count in counts)
            and self.epoch > 0
            and isinstance(self.learning_rate, float)
            and isinstance(self.config, dict)
            and isinstance(self.sha256, str)
            and isinstance(self.val_record, list)
            and all(
                isinstance(entry, dict) and isinstance(entry.get("error_top1"), float)
                for entry in self.val_record
            )
        )


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the file of its tensors, and its state."""

    path: Path
    state: State


@dataclass(frozen=True)
class Run:
    """Where a run writes, and what it goes on from (None: from scratch). The lock lives as long as this."""

    folder: Path
    start: Checkpoint | None
    notices: list[str]
    lock: IO[str]


def open_run(config: Config, n_train: int) -> Run:
    """Makes a new run's folder, or finds the one to go on in, and locks it for this process.

    n_train: training images in the dataset. Raises UserError rather than touch another run's files.
    """
    parent = Path(config.weights_dir)
    if not config.resume_train:
        name = config.run_name or f"{config.model.replace(':', '-')[:80]}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = parent / name
        _make_folder(folder)
        return Run(folder, None, [], _lock(folder))
    folder = folder_to_resume(config)
    lock = _lock(folder)
    if not records(folder) and config.load_epoch == "latest":
        return Run(folder, None, [f"{folder} has no checkpoint yet: starting from scratch"], lock)
    start, notices = find_checkpoint(folder, config.load_epoch)
    notices += _check_same_run(config, n_train, start)
    if config.load_epoch != "latest" and start.path.with_suffix(".json") != records(folder)[-1]:
        # Going on from an older checkpoint in place would overwrite the newer ones.
        branch = folder.with_name(f"{folder.name}-from-{start.state.name}")
        _make_folder(branch)
        notices.append(f"{folder} has newer checkpoints; this run goes to {branch}")
        return Run(branch, start, notices, _lock(branch))
    return Run(folder, start, notices, lock)


def record(tensors: Path, state: State) -> None:
    """Makes a checkpoint exist whose tensors are written, and points `latest` at it."""
    write_text(tensors.with_suffix(".json"), json.dumps(asdict(state), indent=1))
    write_text(tensors.with_name("latest"), tensors.stem + "\n")


def find_checkpoint(folder: Path, load_epoch: int | str) -> tuple[Checkpoint, list[str]]:
    """The checkpoint of an epoch, or the newest valid one ('latest'), and notices about those passed over.

    Raises UserError where there is none, or the one asked for is not whole.
    """
    if isinstance(load_epoch, int):
        path = folder / "checkpoints" / f"epoch_{load_epoch:04d}.json"
        if not path.exists():
            there = ", ".join(record.stem for record in records(folder)) or "none"
            raise UserError(f"{folder}: has no checkpoint of epoch {load_epoch} (there are: {there})")
        return verify(path), []
    notices: list[str] = []
    for path in reversed(records(folder)):
        try:
            return verify(path), notices
        except UserError as error:
            notices.append(f"passing over a checkpoint: {error}")
    raise UserError("; ".join([f"{folder}: has no whole checkpoint to resume from", *notices]))


def verify(record: Path) -> Checkpoint:
    """Reads one checkpoint by its JSON file and compares the checksum of its tensors.

    Raises UserError naming the file that is not whole.
    """
    state = read_state(record)
    tensors = record.with_suffix(".safetensors")
    try:
        found = checksum(tensors)
    except OSError as error:
        raise UserError(f"{tensors}: can't be read: {error.strerror}") from error
    if found != state.sha256:
        raise UserError(f"{tensors}: is damaged or half written: its checksum is not the recorded one")
    return Checkpoint(tensors, state)


def read_state(record: Path) -> State:
    """A checkpoint's JSON file. Raises UserError naming it when it is not what was written."""
    try:
        content = dict(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{record}: is not a whole checkpoint record: {error}") from error
    needed = {field.name for field in fields(State) if field.default is MISSING}
    odd = sorted(needed - content.keys()), sorted(content.keys() - {field.name for field in fields(State)})
    if any(odd):
        words = [
            f"{what} {', '.join(keys)}" for what, keys in zip(("lacks", "has"), odd, strict=True) if keys
        ]
        raise UserError(f"{record}: is not a checkpoint record of this version: it {' and '.join(words)}")
    state = State(**content)
    if not state.is_well_formed():
        raise UserError(f"{record}: is not a checkpoint record: a value has the wrong type")
    return state


def _make_folder(path: Path) -> None:
    """Makes a run's folder; one whose run never came to a checkpoint is used again."""
    try:
        if path.exists() and ((path / "checkpoints").is_dir() and not records(path)):
            return
        (path / "checkpoints").mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UserError(
            f"{path}: already exists; run_name={path.name} resume_train=True goes on with it, "
            "another run_name leaves it alone"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: can't be made: {error.strerror} (weights_dir in the config)") from error


def _lock(folder: Path) -> IO[str]:
    """Locks a run's folder; the lock goes with the process. Removes what a killed run left."""
    try:
        file = open(folder / ".lock", "w")  # noqa: SIM115 (held for as long as the run)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unfinished(folder)
    except BlockingIOError:
        raise UserError(f"{folder}: another run is writing there now") from None
    except OSError as error:
        raise UserError(f"{folder}: can't be written to: {error.strerror}") from error
    return file


def remove_unfinished(folder: Path) -> None:
    """Removes what a process left that was killed while it wrote; nobody writes there now."""
    for leftover in (folder / "checkpoints").glob(".*"):
        leftover.unlink()


def has_checkpoint(config: Config) -> bool:
    """Whether the run called run_name has one, whole or not."""
    return bool(records(Path(config.weights_dir) / str(config.run_name)))


def folder_to_resume(config: Config) -> Path:
    """The run called run_name, or the newest in weights_dir. Raises UserError where there is none."""
    parent, name = Path(config.weights_dir), config.run_name
    if name is not None:
        if not (parent / name / "checkpoints").is_dir():
            raise UserError(f"{parent / name}: there is no such run to resume")
        return parent / name
    return newest(parent)


def newest(parent: Path) -> Path:
    """The run in a folder of runs that wrote a checkpoint last. Raises UserError where there is none."""
    records = [path for path in parent.glob("*/checkpoints/*.json") if _RECORD.fullmatch(path.name)]
    if not records:
        raise UserError(f"{parent}: holds no run with a checkpoint")
    return max(records, key=lambda path: path.stat().st_mtime).parent.parent


def _check_same_run(config: Config, n_train: int, start: Checkpoint) -> list[str]:
    """Raises UserError for what a checkpoint can't go on with; returns notices of other differences."""
    state = start.state
    if state.epoch >= config.n_epochs and len(state.val_record) >= config.n_epochs:
        raise UserError(f"{start.path}: all {config.n_epochs} epochs are done; raise n_epochs to go on")
    now: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    then = {**json.loads(json.dumps(asdict(Config()))), **state.config}  # an older one's has fewer keys
    refused = {"model", "model_args", "input_size", "seed", "optimizer", "ema_decay"}
    refused |= set(OPTIMIZERS[config.optimizer].kept_keys)
    if 0 < state.position < state.n_samples:
        refused |= {"shuffle", "shuffle_block"}
        if n_train != state.n_samples:
            raise UserError(
                f"{start.path}: stopped in an epoch of {state.n_samples} images, not of {n_train}"
            )
    notices = []
    if SCHEDULES[config.lr_policy].spans_run and config.n_epochs != then["n_epochs"]:
        notices.append(
            f"the learning rate falls over n_epochs: {config.n_epochs} now, {then['n_epochs']} before"
        )
    for key in sorted(now.keys() - _UNREMARKABLE):
        was = then[key]
        if now[key] != was and key in refused:
            raise UserError(f"{start.path}: was made with {key}: {was}, the configuration says {now[key]}")
        if now[key] != was:
            notices.append(f"{key} is {now[key]} now, was {was} before")
    return notices


def records(folder: Path) -> list[Path]:
    """The JSON files of all checkpoints, oldest position first."""
    found = []
    for path in (folder / "checkpoints").glob("*.json"):
        match = _RECORD.fullmatch(path.name)
        if match:
            position = int(match[2]) if match[2] else float("inf")
            found.append((int(match[1]), position, path))
    return [path for _, _, path in sorted(found)]
