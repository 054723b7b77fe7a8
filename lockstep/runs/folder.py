"""A run's folder: its files, its lock, and what it resumes from. Nothing here needs torch.

    runs/<name>/config.yaml                     the resolved configuration, readable by --config
    runs/<name>/dataset.json, dataset_mean.npy  the dataset's classes, geometry and mean; with -until-<at> in
                                                their names those of older checkpoints, if they differ
    runs/<name>/receipts.jsonl                  with logical_ranks: a chain of digests of the state
    runs/<name>/network/                        a copy of the network's source, for people; with -until-<at>
                                                in its name that of older checkpoints, if it differs
    runs/<name>/log.jsonl                       JSON lines: every start (with versions), line of
                                                progress, validation, checkpoint and end
    runs/<name>/checkpoints/<at>.safetensors    weights, optimizer state, buffers
    runs/<name>/checkpoints/<at>.json           everything else, and the checksum of the file above
    runs/<name>/checkpoints/latest              the name of the newest, <at>
    runs/<name>/tensorboard/                    event files, with tensorboard: true
    runs/<name>/resize.json                     a request of `lockstep resize`, and resize_answer.json
    runs/<name>/trace/, trace.json              with trace: true, and by `python -m lockstep.trace`
    runs/<name>/postmortem/                     after a loss that is not finite: images and tensors
    runs/<name>/report.html, report/*.png       written by `python -m lockstep.report`

The JSON file is written after the tensors and makes the checkpoint exist; `latest` follows, for people. Each
file appears by a rename, so a process can be killed at any moment and every named file is still complete.
"""

import fcntl
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from lockstep.config import Config, run_to_yaml
from lockstep.config.hosts import OWN_KEYS
from lockstep.config.layers import with_absolute_paths, with_order
from lockstep.config.tasks import monitor_of
from lockstep.data.description import Description
from lockstep.errors import NothingToTrain, UserError
from lockstep.files import write_text
from lockstep.optim import OPTIMIZERS
from lockstep.optim.schedules import spans_run
from lockstep.runs.checkpoint_files import find_checkpoint, is_record, records, remove_unfinished
from lockstep.runs.dataset_description import check_same_classes, read_description, write_description
from lockstep.runs.metrics import has_ended
from lockstep.runs.network_source import changed_source, keep_source
from lockstep.runs.receipts import NAME as RECEIPTS
from lockstep.runs.state import Checkpoint, position_of

# What to do if a run stopped within an epoch of another dataset: of a folder, and of Python objects.
_SAME_DATA = (
    "Set data_folder to that dataset, or load_epoch to a complete epoch.",
    "Give the datasets of that run (train_data and val_data, or data), or load_epoch of a complete epoch.",
)
_BRANCH = "-from-"  # between the names of a run and of the checkpoint from which another one continues it
_LOCK_SECONDS = 0.1  # between two looks at another run's lock
# Keys that may differ between a run and its resumption without a note.
_FREE_KEYS = {"resume_train", "load_epoch", "run_name", "weights_dir", "n_epochs"}
_FREE_KEYS |= {"devices", "batch_size", "shares", "tensorboard", "report", "trace", *OWN_KEYS}


@dataclass(frozen=True)
class RunFolder:
    """An open run.

    Attributes:
        folder: Where the run writes.
        start: The checkpoint that it resumes from; None from scratch.
        notes: Lines for the user.
        lock: The locked file; the lock is released when it is closed.
    """

    folder: Path
    start: Checkpoint | None
    notes: list[str]
    lock: IO[str]


def open_run(config: Config, n_train: int, dataset: str = "", class_names: Sequence[str] = ()) -> RunFolder:
    """Create a new run's folder, or find the one to resume, and lock it for this process.

    Args:
        n_train: Number of training images in the dataset.
        dataset: The digest of the dataset's manifest; '' without one.
        class_names: Of the dataset's classes; () checks none.

    Raises:
        UserError: The folder belongs to another run, there is no run or checkpoint to resume, or its
            classes have other names.
    """
    parent = Path(config.weights_dir)
    if not config.resume_train:
        notes = _notes_on_pretrained(config, class_names)
        if config.run_name:
            folder = parent / config.run_name
            _make_folder(folder)
        else:
            folder = make_folder_named_by_time(parent, config.model)
        return RunFolder(folder, None, notes, _lock_new(folder))
    folder = folder_to_resume(config)
    if not records(folder) and config.load_epoch == "latest":
        _check_is_no_branch(folder)
        notes = [f"{folder} has no checkpoint yet: starting from scratch"]
        return RunFolder(folder, None, notes, _lock_new(folder))
    lock = _lock(folder)
    start, notes = find_checkpoint(folder, config.load_epoch)
    notes += _check_same_run(config, n_train, start) + _check_same_dataset(config, dataset, start)
    if description := read_description(folder):
        _check_same_number(config, class_names, description, folder)
        check_same_classes(class_names, config.data or config.data_folder, description, folder)
    if changed := changed_source(folder, config.model, start.state.name):
        notes.append(f"{changed}; the run continues with the changed file")
    branch = folder_after(folder, start.state.name)
    if config.load_epoch != "latest" and branch != folder:
        again = f"pretrained={folder} pretrained_epoch={config.load_epoch} pretrained_part=whole"
        _make_folder(branch, f"{again} and a run_name go another way from there")
        notes.append(f"{folder} has newer checkpoints; this run goes to {branch}")
        return RunFolder(branch, start, notes, _lock(branch))
    return RunFolder(folder, start, notes, lock)


def _notes_on_pretrained(config: Config, class_names: Sequence[str]) -> list[str]:
    """Return a note if a new run takes the last layer of a run whose classes have other names.

    Raises:
        UserError: It would continue the training of that run (`pretrained_part: whole`).
    """
    if config.pretrained is None or config.new_head:
        return []
    path = Path(config.pretrained)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    if not (folder / "checkpoints").is_dir():
        return []
    try:
        if description := read_description(folder):
            check_same_classes(class_names, config.data or config.data_folder, description, folder)
    except UserError as error:
        if config.pretrained_part == "whole":
            raise
        return [f"{error} new_head: true begins a last layer for other classes."]
    return []


def log_name(host: int) -> str:
    """Return the name of the log that a host writes into the run's folder."""
    return f"host{host}.jsonl" if host else "log.jsonl"


def logs_of(folder: Path) -> list[Path]:
    """Return the paths of the logs in a run's folder, host 0's first, which may not exist."""
    return [folder / log_name(0), *sorted(folder.glob("host*.jsonl"))]


def log_of(folder: Path) -> Path:
    """Return the log of a run's folder: host 0's, or else that of the host whose folder it is."""
    logs = logs_of(folder)
    return next((log for log in logs if log.exists()), logs[0])


def folder_after(folder: Path, name: str) -> Path:
    """Return the folder to which a run writes that is resumed from one of its checkpoints.

    It is another one if there are newer checkpoints, which would be overwritten.

    Args:
        folder: The run's folder.
        name: The checkpoint's name, such as 'epoch_0003'.
    """
    known = records(folder)
    is_newest = not known or known[-1].stem == name
    return folder if is_newest else folder.with_name(f"{folder.name}{_BRANCH}{name}")


def _check_is_no_branch(folder: Path) -> None:
    """Raise UserError if a folder without checkpoints was to continue another run."""
    origin, _, name = folder.name.rpartition(_BRANCH)
    epoch, position = position_of(name) or (0, 0)
    if origin and position == math.inf and (folder.parent / origin / "checkpoints" / f"{name}.json").exists():
        raise UserError(
            f"{folder}: was to continue {origin} after epoch {epoch}, and has saved nothing yet. Begin "
            f"it again: resume_train=True run_name={origin} load_epoch={epoch}, and its other keys"
        )


def keep_settings(folder: Path, config: Config, description: Description, start: str) -> None:
    """Write a run's configuration, its dataset's description and its network's source into its folder.

    Args:
        start: The name of the checkpoint that the run resumes from; '' from scratch.

    Raises:
        UserError: A file can't be written.
    """
    write_description(folder, description, start)
    keep_source(folder, config.model, start)
    write_text(folder / "config.yaml", run_to_yaml(config))


def make_folder_named_by_time(parent: Path, model: str) -> Path:
    """Create the folder of a run without a name; a run of the same second gets a suffix: -2, -3, ..."""
    name = f"{model.replace(':', '-')[:80]}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()  # succeeds in one process only
            (folder / "checkpoints").mkdir()
            return folder
        except FileExistsError:
            if not folder.exists():  # the error is about `parent`
                raise UserError(f"{parent}: is not a folder (weights_dir in the config)") from None
        except OSError as error:
            raise _cant_make(folder, error) from error
    raise AssertionError("never reached")


def _make_folder(path: Path, otherwise: str = "another run_name leaves it alone") -> None:
    """Create a run's folder. One without a checkpoint is reused; `otherwise` ends the refusal of others."""
    try:
        if path.exists() and ((path / "checkpoints").is_dir() and not records(path)):
            return
        (path / "checkpoints").mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        if not path.exists():  # as after a disk was not mounted
            text = "it, or a folder above it, is a link to a folder that does not exist"
            raise UserError(f"{path}: can't be made: {text} (weights_dir in the config)") from None
        raise UserError(
            f"{path}: already exists; run_name={path.name} resume_train=True resumes it, {otherwise}"
        ) from None
    except OSError as error:
        raise _cant_make(path, error) from error


def _cant_make(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: can't be made: {error.strerror} (weights_dir in the config)")


def _lock_new(folder: Path) -> IO[str]:
    """Lock the folder of a run that begins, and remove receipts of one that ended without a checkpoint."""
    lock = _lock(folder)
    try:
        (folder / RECEIPTS).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder / RECEIPTS}: can't be removed: {error.strerror}") from error
    return lock


def _lock(folder: Path) -> IO[str]:
    """Do as `lock_if_free`, or raise UserError if another run has the lock."""
    if (file := lock_if_free(folder)) is None:
        raise UserError(f"{folder}: another run is writing there now")
    return file


def lock_if_free(folder: Path) -> IO[str] | None:
    """Lock a run's folder until the file is closed, and remove a killed run's temporary files.

    Returns:
        The locked file; None if another process has the lock.

    Raises:
        UserError: The folder can't be written to.
    """
    try:
        file = open(folder / ".lock", "w")  # noqa: SIM115 (stays open as long as the run)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unfinished(folder)
    except BlockingIOError:
        return None
    except OSError as error:
        raise UserError(f"{folder}: can't be written to: {error.strerror}") from error
    return file


def await_end(config: Config) -> bool:
    """Wait until no other process has the run's lock, up to `preempt_seconds`. Return whether one had it."""
    path = Path(config.weights_dir) / str(config.run_name) / ".lock"
    begin, seconds = time.monotonic(), config.preempt_seconds or 0.0
    while _is_locked(path):
        if time.monotonic() - begin > seconds:
            return True
        time.sleep(_LOCK_SECONDS)
    return time.monotonic() - begin > _LOCK_SECONDS


def is_running(folder: Path) -> bool:
    """Return whether a launcher on this machine has a run's lock."""
    return _is_locked(folder / ".lock")


def _is_locked(path: Path) -> bool:
    """Return whether another process has a lock on a file, which may not exist."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # `_lock` reports it
        return False
    return False


def has_checkpoint(config: Config) -> bool:
    """Return whether the run called `run_name` has a checkpoint, damaged or not."""
    return bool(records(Path(config.weights_dir) / str(config.run_name)))


def folder_to_resume(config: Config) -> Path:
    """Return the folder of run `run_name`, or of the newest run. Raise UserError if there is none."""
    parent, name = Path(config.weights_dir), config.run_name
    if name is not None:
        if not (parent / name / "checkpoints").is_dir():
            raise UserError(f"{parent / name}: there is no such run to resume")
        return parent / name
    return newest(parent)


def newest(parent: Path) -> Path:
    """Return the folder of the run with the newest checkpoint. Raise UserError if there is none."""
    found = [path for path in parent.glob("*/checkpoints/*.json") if is_record(path)]
    if not found:
        raise UserError(f"{parent}: holds no run with a checkpoint")
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


def _check_same_run(config: Config, n_train: int, start: Checkpoint) -> list[str]:
    """Raise UserError for settings that a checkpoint can't resume with; return notes on other differences."""
    state = start.state
    if state.epoch > config.n_epochs or (state.epoch == config.n_epochs and state.is_complete):
        raise NothingToTrain(
            f"{start.path}: all {config.n_epochs} epochs are done; raise n_epochs to train longer"
        )
    monitor = monitor_of(config)
    if has_ended(state.val_record, monitor, config.patience):
        raise NothingToTrain(
            f"{start.path}: the run has ended, with no better {monitor} within patience "
            f"({config.patience}); raise patience to train longer"
        )
    validated = [entry.get("epoch", number) for number, entry in enumerate(state.val_record, start=1)]
    if config.lr_policy == "auto" and validated != list(range(1, state.epoch + state.is_complete)):
        raise UserError(
            f"{start.path}: lr_policy: auto compares the errors of consecutive epochs, and not all epochs "
            "were validated. Resume with another lr_policy."
        )
    now: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    then = {**json.loads(json.dumps(asdict(Config()))), **state.config}  # an older checkpoint has fewer keys
    now, then = (with_order(with_absolute_paths(keys)) for keys in (now, then))
    refused = {"model", "model_args", "input_size", "seed", "optimizer", "ema_decay", "freeze"}
    refused |= {"unfreeze_epoch", "task"}
    refused |= set(OPTIMIZERS[config.optimizer].kept_keys)
    if "use_momentum" in refused and 0 in (now["momentum"], then["momentum"]):  # no state without momentum
        refused.add("momentum")
    if state.is_within_epoch:
        refused |= {"shuffle", "shuffle_block", "sampler"}
        if n_train != state.n_samples:
            raise UserError(
                f"{start.path}: stopped in an epoch of {state.n_samples} images, not of {n_train}: "
                f"{config.data or config.data_folder} is not the dataset that the run trained on. "
                + _SAME_DATA[config.data is not None]
            )
    notes = []
    if n_train != state.n_samples:
        notes.append(f"the dataset has {n_train:,} training images now, {state.n_samples:,} before")
    if spans_run(config) and config.n_epochs != then["n_epochs"]:
        notes.append(
            f"the learning rate falls over n_epochs: {config.n_epochs} now, {then['n_epochs']} before"
        )
    for key in sorted(now.keys() - _FREE_KEYS):
        was = then[key]
        if now[key] != was and key in refused:
            raise UserError(
                f"{start.path}: was made with {key}: {was}, the configuration says {now[key]}. Resume with "
                f"the former {key}, or begin a new run."
            )
        if now[key] != was:
            notes.append(f"{key} is {now[key]} now, was {was} before{_effect_of(key, now, then)}")
    return notes


def _check_same_number(
    config: Config, class_names: Sequence[str], description: Description, folder: Path
) -> None:
    """Raise UserError if a dataset has another number of classes than the run; () checks none."""
    if class_names and len(class_names) != description.n_classes:
        which = f" (n_classes={config.n_classes})" if config.n_classes == len(class_names) else ""
        raise UserError(
            f"{config.data or config.data_folder}: has {len(class_names)} classes{which}, and the training "
            f"data of {folder} had {description.n_classes}. Give data with as many classes, or begin a new "
            f"run with pretrained={folder} new_head=true."
        )


def _effect_of(key: str, now: dict[str, Any], then: dict[str, Any]) -> str:
    """Return the end of a note on a changed key: why it has no effect, or ''."""
    if key.startswith("pretrained") or key == "new_head":
        return ", without effect: the run has its weights from its checkpoint"
    if key in ("val_split", "cache_folder") and now["data_folder"] == then["data_folder"]:
        return ", without effect: data_folder is a converted set. Give the folder of images"
    return ""


def _check_same_dataset(config: Config, dataset: str, start: Checkpoint) -> list[str]:
    """Return notes on a changed dataset. Raise UserError if the checkpoint lies within an epoch."""
    state, notes = start.state, notes_on_dataset(config, dataset, start)
    if notes and state.is_within_epoch:
        raise UserError(
            f"{notes[0]}, which stopped within epoch {state.epoch} ({start.path}). "
            + _SAME_DATA[config.data is not None]
        )
    return notes


def notes_on_dataset(config: Config, dataset: str, checkpoint: Checkpoint) -> list[str]:
    """Return a note if a dataset is not the one of a checkpoint.

    Args:
        config: Names the dataset.
        dataset: The dataset's digest; '' without one.
        checkpoint: Has the digest of the dataset that the run trained on.
    """
    if not dataset or not checkpoint.state.dataset or dataset == checkpoint.state.dataset:
        return []
    name, by = (config.data, "survey") if config.data else (config.data_folder, "manifest")
    return [f"{name}: holds another dataset than the one of the checkpoint, by its {by}"]
