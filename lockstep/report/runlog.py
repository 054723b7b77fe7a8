"""Reads a run's folder, also while the run goes on, and as older versions wrote it.

What is missing or broken is left out and told in `notes`; only a folder of which nothing is left is an error.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import config as configuration
from lockstep.errors import UserError
from lockstep.runs import folder as runfolder
from lockstep.runs.folder import Checkpoint

_YEAR_10000 = 253_402_300_800  # in seconds since 1970; what is later is no time
PHASES = ("load-wait", "compute", "meet", "exchange")


@dataclass(frozen=True)
class Point:
    """A line of progress. epochs: how many were done, with a fraction; seconds: by phase, may be empty."""

    epochs: float
    learning_rate: float | None
    loss: float | None
    error: float | None
    images_per_second: float | None
    seconds_per_step: float | None
    seconds: dict[str, float]
    bytes_per_step: float | None = None
    network_bytes_per_step: float | None = None


@dataclass(frozen=True)
class Validation:
    """One epoch's validation; errors are shares of the images."""

    epoch: int
    loss: float | None
    error_top1: float
    error_top5: float | None


@dataclass
class RunLog:
    """What a run has told. seconds: how long it ran in all its starts; ending: None while it goes on."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)  # which way each part was computed
    n_starts: int = 0
    seconds: float = 0.0
    last_time: float | None = None  # of the last line, in seconds since 1970
    ending: dict[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Validation | None:
        return min(self.validations, key=lambda entry: entry.error_top1, default=None)


def read_run(folder: Path) -> RunLog:
    """Raises UserError where `folder` is not a run's, or nothing in it can be shown."""
    path = folder / "log.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such run folder")
    run = RunLog(folder, folder.resolve().name)
    has_checkpoints = any((folder / "checkpoints").glob("*.json"))
    if path.exists():
        _Reading(run).take_all(_read_events(path, run.notes))
    elif has_checkpoints:
        run.notes.append(f"{path}: is not there; what is shown is the newest checkpoint's")
    else:
        raise UserError(f"{folder}: is not a run's folder: it has no log.jsonl")
    if has_checkpoints:
        _find_checkpoint(run)
    is_empty = not (run.points or run.validations or run.checkpoint)
    if is_empty and (run.notes or not run.n_starts):  # not where it has just begun
        notes = run.notes or [f"{path}: tells of no start, progress or validation"]
        raise UserError("; ".join([f"{folder}: nothing of this run can be shown", *notes]))
    _read_config(run)
    return run


def _read_events(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """All whole lines. The last one may be half written, which is nothing to speak of."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    events, n_broken = [], 0
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            n_broken += line.endswith("\n")
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            n_broken += 1
    if not events:
        notes.append(f"{path}: holds no line of a run")
    elif n_broken:
        notes.append(f"{path}: {n_broken} of {len(lines)} lines are not a run's and were left out")
    return events


class _Reading:
    """Goes through a log. What a resumed run does again replaces what was there from that place on."""

    def __init__(self, run: RunLog) -> None:
        self._run = run
        self._started: float | None = None
        self._n_unusable = 0

    def take_all(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self._clock(event)
            kind = event["event"]
            if kind == "started":
                self._start(event)
            elif kind == "ways":
                self._run.ways = _mapping(event.get("ways"))
            elif kind == "notice":
                self._notice(str(event.get("text")))
            elif kind == "progress":
                self._progress(event)
            elif kind == "validated":
                self._validated(event)
            elif kind == "ended":
                self._run.ending = event
        if self._n_unusable:
            what = f"{self._n_unusable} lines of progress or validation lack the epoch, the step or the error"
            self._run.notes.append(f"{self._run.folder / 'log.jsonl'}: {what} and were left out")

    def _clock(self, event: dict[str, Any]) -> None:
        now = _number(event, "time")
        if now is None or not 0 <= now < _YEAR_10000 or event["event"] == "resumed":  # told before the start
            return
        if event["event"] == "started":
            self._started = now
        elif self._started is not None:
            self._run.seconds += max(0.0, now - max(self._started, self._run.last_time or 0.0))
        self._run.last_time = now

    def _start(self, event: dict[str, Any]) -> None:
        run = self._run
        run.n_starts += 1
        run.ending = None
        run.versions = _mapping(event.get("versions"))
        run.machine = _mapping(event.get("machine"))

    def _notice(self, text: str) -> None:
        """'NAME: ...' is news of one of the ways."""
        name, _, words = text.partition(": ")
        if name in self._run.ways:
            self._run.ways[name] = words

    def _progress(self, event: dict[str, Any]) -> None:
        epoch, step, n_steps = (_number(event, key) for key in ("epoch", "step", "n_steps"))
        if not epoch or not step or not n_steps:
            self._n_unusable += 1
            return
        run, place = self._run, epoch - 1 + step / n_steps
        while run.points and run.points[-1].epochs >= place:
            run.points.pop()
        self._drop_validations(epoch)
        per_20 = _number(event, "seconds_per_20")
        seconds = _mapping(event.get("seconds"))
        run.points.append(
            Point(
                place,
                _number(event, "learning_rate"),
                _number(event, "loss" if "loss" in event else "cost"),  # as older versions called it
                _number(event, "error"),
                _number(event, "images_per_second"),
                per_20 / 20 if per_20 else None,
                {phase: _number(seconds, phase) or 0.0 for phase in PHASES if phase in seconds},
                _number(event, "bytes_per_step"),
                _number(event, "network_bytes_per_step"),
            )
        )

    def _validated(self, event: dict[str, Any]) -> None:
        entry = _validation(event)
        if entry is None:
            self._n_unusable += 1
            return
        self._drop_validations(entry.epoch)
        self._run.validations.append(entry)

    def _drop_validations(self, epoch: float) -> None:
        entries = self._run.validations
        while entries and entries[-1].epoch >= epoch:
            entries.pop()


def _read_config(run: RunLog) -> None:
    path = run.folder / "config.yaml"
    try:
        run.config = dict(configuration.read_yaml(path).values)
    except UserError as error:
        run.notes.append(str(error))
    if not isinstance(run.config.get("devices", []), list):
        run.notes.append(f"{path}: devices must be a list, not {run.config.pop('devices')!r}")


def _find_checkpoint(run: RunLog) -> None:
    """The newest whole checkpoint. A run that began from another's has its first epochs' validation there."""
    try:
        run.checkpoint, notices = runfolder.find_checkpoint(run.folder, "latest")
    except UserError as error:
        run.notes.append(str(error))
        return
    run.notes += notices
    known = {entry.epoch for entry in run.validations}
    earlier = [entry for entry in map(_validation, run.checkpoint.state.val_record) if entry]
    run.validations += [entry for entry in earlier if entry.epoch not in known]
    run.validations.sort(key=lambda entry: entry.epoch)


def _validation(values: dict[str, Any]) -> Validation | None:
    epoch, error = _number(values, "epoch"), _number(values, "error_top1")
    if not epoch or error is None:
        return None
    return Validation(int(epoch), _number(values, "loss"), error, _number(values, "error_top5"))


def _number(values: dict[str, Any], key: str) -> float | None:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
