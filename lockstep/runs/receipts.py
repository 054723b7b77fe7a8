"""Receipts: a chain of records of a run's state, which `lockstep verify` checks. Nothing here needs torch.

runs/<name>/receipts.jsonl has one JSON object on each line. Each has the SHA-256 of the state and of all
that the state depends on, the hash of the receipt before it, and its own. So a change of any byte shows,
unless all later receipts are made anew.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lockstep.config import Config, run_to_yaml
from lockstep.config.hosts import OWN_KEYS
from lockstep.config.layers import DATASET_PATHS, with_order
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.data.manifest import digest_of_labels
from lockstep.errors import UserError
from lockstep.files import checksum, parse_json
from lockstep.optim.schedules import spans_run

NAME = "receipts.jsonl"
# Keys that change neither a bit of the training nor the meaning of a checkpoint.
_PLACES = ("run_name", "weights_dir", "cache_folder", "resume_train", "load_epoch")
_DATA = (*DATASET_PATHS, "check_sums")
_DEVICES = ("devices", "batch_size", "shares", "pin_cores", "exchange", "overlap", "upload")
_HOSTS = ("n_hosts", *OWN_KEYS, "network")
_LOADING = ("para_load", "n_slots", "read_threads", "read_retries", "loader_restarts")
_SHOWN = ("tensorboard", "report", "trace", "print_freq", "print_train_error", "monitor", "threshold")
_ENDS = ("patience", "timeout", "on_failure", "max_restarts", "preempt_seconds")
_SAVING = ("snapshot_freq", "keep_checkpoints", "checkpoint_minutes", "memory_checkpoint_seconds")
_CHECKS = ("check_every", "recheck_every")
_FREE_KEYS = {*_PLACES, *_DATA, *_DEVICES, *_HOSTS, *_LOADING, *_SHOWN, *_ENDS, *_SAVING, *_CHECKS}

Basis = tuple[str, str, str]  # SHA-256 of settings, of a dataset's manifest, and of its labels and mean


@dataclass(frozen=True)
class Receipt:
    """One record of a run.

    Attributes:
        number: From 0, in the file.
        kind: 'start' of a process, 'recovery' if it started from a checkpoint in memory, 'step' without a
            checkpoint, or 'checkpoint'.
        step: Steps of the whole run up to here.
        epoch: The current epoch, from 1.
        position: Samples of that epoch that have been trained on.
        state: SHA-256 of weights, optimizer state and buffers: of the checkpoint's file of tensors.
        checkpoint: The checkpoint's name; '' without one.
        record: SHA-256 of the checkpoint's JSON file; '' without one.
        config: SHA-256 of the run's config.yaml.
        settings: SHA-256 of the keys that the state depends on.
        manifest: SHA-256 of the dataset's manifest.json; '' without one.
        labels: SHA-256 of all labels and of the mean that is subtracted.
        versions: Of the packages that compute, and of oneDNN.
        machine: The devices, the instruction set of the processor, and the threads of a trainer.
        previous: The hash of the receipt before this one; '' in the first.
        hash: SHA-256 of all other fields.
    """

    number: int
    kind: Literal["start", "recovery", "step", "checkpoint"]
    step: int
    epoch: int
    position: int
    state: str
    checkpoint: str
    record: str
    config: str
    settings: str
    manifest: str
    labels: str
    versions: dict[str, str]
    machine: dict[str, str]
    previous: str = ""
    hash: str = ""

    @property
    def basis(self) -> Basis:
        """What the state depends on, beside the steps."""
        return self.settings, self.manifest, self.labels

    @property
    def begins_run(self) -> bool:
        """True for the state before the first step. After a step of fewer images, `step` may be 0, too."""
        return self.epoch == 1 and self.position == 0

    def sealed(self) -> "Receipt":
        """Return the receipt with its hash."""
        content = {key: value for key, value in asdict(self).items() if key != "hash"}
        return dataclasses.replace(self, hash=hashlib.sha256(_dump(content).encode()).hexdigest())

    def line(self) -> str:
        """Return the receipt's line in the file, without its end."""
        return _dump(asdict(self))


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of_config(config: Config) -> str:
    """Return the SHA-256 of the run's config.yaml."""
    return hashlib.sha256(run_to_yaml(config).encode()).hexdigest()


def digest_of_settings(config: Config) -> str:
    """Return the SHA-256 of the keys that a run's state depends on."""
    free = _FREE_KEYS if spans_run(config) else _FREE_KEYS | {"n_epochs"}
    kept = {key: value for key, value in with_order(asdict(config)).items() if key not in free}
    return hashlib.sha256(_dump(kept).encode()).hexdigest()


def digests_of_data(dataset: Dataset) -> tuple[str, str]:
    """Return the SHA-256 of the manifest ('' without one), and of both halves' labels and the mean.

    The labels of Python objects are known only to loaders: their fingerprint stands for them.
    """
    if dataset.survey:
        return "", hashlib.sha256(dataset.survey.fingerprint.encode() + dataset.mean.tobytes()).hexdigest()
    manifest = checksum(dataset.manifest.path) if dataset.manifest else ""
    labels = digest_of_labels(dataset.train.labels) + digest_of_labels(dataset.val.labels)
    return manifest, hashlib.sha256(labels.encode() + dataset.mean.tobytes()).hexdigest()


def basis_of(config: Config, recorded: Config) -> Basis:
    """Return the basis of receipts of a dataset and settings.

    Args:
        config: Names the dataset.
        recorded: The settings as the receipts have them.

    Raises:
        UserError: As `open_dataset`.
    """
    return digest_of_settings(recorded), *digests_of_data(open_dataset(config))


class ReceiptFile:
    """The receipts of a run, to which the process that holds the run's lock adds.

    Args:
        folder: The run's folder. A line that a killed process has not finished is removed.

    Raises:
        UserError: The last receipt is damaged, or the file can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._number, self._previous = 0, ""
        if not self.path.exists():
            return
        try:
            content = self.path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(self.path, len(whole))
        except OSError as error:
            raise UserError(f"{self.path}: can't be used: {error.strerror}") from error
        lines = whole.splitlines()
        if lines:
            last = parse(lines[-1].decode(errors="replace"))
            if last is None:
                raise UserError(f"{self.path}: its last receipt is damaged. Move the file away to go on.")
            self._number, self._previous = last.number + 1, last.hash

    def add(self, receipt: Receipt) -> None:
        """Append a receipt with its number, the previous hash and its own. Raises OSError."""
        linked = dataclasses.replace(receipt, number=self._number, previous=self._previous).sealed()
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(linked.line() + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._number, self._previous = linked.number + 1, linked.hash


def parse(line: str) -> Receipt | None:
    """Return the receipt of a line; None if it is none, or not as `Receipt.line` writes it."""
    content = parse_json(line)
    if not isinstance(content, dict) or content.keys() != {field.name for field in fields(Receipt)}:
        return None
    receipt = Receipt(**content)
    try:
        return receipt if receipt.line() == line and _has_types(receipt) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _has_types(receipt: Receipt) -> bool:
    numbers = (receipt.number, receipt.step, receipt.epoch, receipt.position)
    texts = (receipt.state, receipt.checkpoint, receipt.record, receipt.hash, receipt.previous)
    tables = (receipt.versions, receipt.machine)
    return (
        all(type(number) is int for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(table, dict) for table in tables)
        and re.fullmatch("[1-9][0-9]{0,4}", str(receipt.machine.get("threads"))) is not None
    )


def read(folder: Path) -> tuple[list[Receipt], list[str]]:
    """Return a run's receipts, and a line for each one that breaks the chain.

    Raises:
        UserError: The run has no receipts.
    """
    path = folder / NAME
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise UserError(
            f"{folder}: has no receipts, so it can't be verified. Runs with logical_ranks keep them "
            f"in {NAME}."
        ) from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    if not text:
        raise UserError(
            f"{path}: is empty: the run has not begun, or its receipts were removed. Nothing can be verified."
        )
    found: list[Receipt] = []
    problems: list[str] = []
    for number, line in enumerate(text.removesuffix("\n").split("\n")):
        receipt = parse(line)
        if receipt is None:
            problems.append(f"receipt {number}: is damaged: it is no line as Lockstep writes it")
            continue
        problems += _broken(number, receipt, found)
        found.append(receipt)
    if not text.endswith("\n"):
        problems.append("the last receipt: is not complete, or its end was changed")
    return found, problems


def _broken(number: int, receipt: Receipt, before: Sequence[Receipt]) -> list[str]:
    problems = []
    if receipt.sealed().hash != receipt.hash:
        problems.append(f"receipt {number}: its content does not have its hash: it was changed")
    if receipt.number != number:
        problems.append(f"receipt {number}: says that it is number {receipt.number}")
    if len(before) == number and receipt.previous != (before[-1].hash if before else ""):
        problems.append(f"receipt {number}: does not follow the receipt before it")
    return problems
