"""Reading of a run's folder, also during the run, and of folders that version 0.1 wrote.

Missing or damaged parts are omitted and named in `notes`. Only a folder without any usable part is an error.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import config as configuration
from lockstep.comm.messages import EpochTimes, RankTimes
from lockstep.config.tasks import Monitor, monitor_in
from lockstep.errors import UserError
from lockstep.files import parse_event, refusing_unusable_paths
from lockstep.runs import checkpoint_files
from lockstep.runs.folder import log_of, logs_of
from lockstep.runs.metrics import HIGHER_IS_BETTER, AnswerCounts, best_epoch
from lockstep.runs.state import Checkpoint
from lockstep.runs.stragglers import PHASES, added, waiting_phases

_OLD_PHASES = {"meet": "barrier"}  # until 2026-11
_YEAR_10000 = 253_402_300_800  # in seconds since 1970; later times are invalid


@dataclass(frozen=True)
class Point:
    """A line of progress. epochs: completed epochs with a fraction. seconds: by phase, may be empty."""

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
    """The validation of one epoch. Errors are shares of the images.

    Attributes:
        error_top1: None with `task: multilabel`, which has the values below instead.
        label_error: The share of all decisions that are wrong.
        monitored: The values by which the key `monitor` can choose the best epoch, as far as they are known.
        event: Its line of the log, or the checkpoint's record of it.
    """

    epoch: int
    loss: float | None
    error_top1: float | None
    error_top5: float | None
    mean_average_precision: float | None = None
    macro_f1: float | None = None
    label_error: float | None = None
    monitored: dict[str, float] = field(default_factory=dict)
    event: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunLog:
    """The log of a run. seconds: total over all starts. exit_status: None during the run."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    rank_times: list[EpochTimes] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    implementations: dict[str, str] = field(default_factory=dict)  # by part, such as "our kernel" or "torch"
    n_starts: int = 0
    seconds: float = 0.0
    last_time: float | None = None  # time of the last line, in seconds since 1970
    exit_status: dict[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)
    classes_epoch: int = 0  # of the newest validation in the log, whose metrics by class follow
    answers: AnswerCounts | None = None
    # with task: multilabel, the metrics of each class, and their means
    columns: dict[str, list[float]] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)

    @property
    def newest_times(self) -> EpochTimes | None:
        """All trainers' times in the later half of the epochs with as many trainers as the last one.

        None if there is no whole epoch of several trainers.
        """
        known = [each for each in self.rank_times if _kind(each) == _kind(self.rank_times[-1])]
        return added(known[len(known) // 2 :]) if known and len(known[0].ranks) > 1 else None

    @property
    def monitor(self) -> Monitor:
        """The value that says which epoch is best: the task's own if no validation has that of the key."""
        monitor = monitor_in(self.config)
        is_measured = any(monitor in entry.monitored for entry in self.validations)
        return monitor if is_measured else monitor_in({**self.config, "monitor": None})

    @property
    def best(self) -> Validation | None:
        """The validation of the best epoch by `monitor`; of several, the earliest."""
        record = [{"epoch": entry.epoch, **entry.monitored} for entry in self.validations]
        best = best_epoch(record, self.monitor)
        return next((entry for entry in self.validations if entry.epoch == best), None)

    @property
    def is_multilabel(self) -> bool:
        """True if an image has any number of classes."""
        return self.config.get("task") == "multilabel"


@refusing_unusable_paths()
def read_run(folder: Path) -> RunLog:
    """Read a run's folder.

    Raises:
        UserError: The folder is not a run's, or nothing in it can be shown.
    """
    path = log_of(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such run folder")
    run = RunLog(folder, folder.resolve().name)
    has_checkpoints = any((folder / "checkpoints").glob("*.json"))
    if path.exists():
        _Reading(run).take_all(_read_logs(folder, run.notes))
    elif has_checkpoints:
        run.notes.append(f"{path}: is not there; what is shown is the newest checkpoint's")
    else:
        raise UserError(f"{folder}: is not a run's folder: it has no log.jsonl")
    if has_checkpoints:
        _find_checkpoint(run)
    is_empty = not (run.points or run.validations or run.checkpoint)
    if is_empty and (run.notes or not run.n_starts):  # a run that has just started is also empty
        notes = run.notes or [f"{path}: tells of no start, progress or validation"]
        raise UserError("; ".join([f"{folder}: nothing of this run can be shown", *notes]))
    _read_config(run)
    return run


def _read_logs(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the events of all starts, in the order in which the starts began.

    A host may have had several numbers, and then has several logs. Hosts that share the folder log the
    same starts: of starts that overlap, the one in the first of the logs counts.
    """
    logs = [_read_events(log, notes) for log in logs_of(folder) if log.exists()]
    if len(logs) == 1:  # also if the clock was set back between two starts
        return logs[0]
    found: list[_Start] = []
    for log in logs:
        found += [start for start in _starts(log) if not any(map(start.overlaps, found))]
    return [event for start in sorted(found, key=lambda each: each.first) for event in start.events]


@dataclass(frozen=True)
class _Start:
    """What one launcher logged from its start to its end, and the first and last time of that."""

    events: list[dict[str, Any]]
    first: float
    last: float

    def overlaps(self, other: "_Start") -> bool:
        return self.first <= other.last and other.first <= self.last


def _starts(events: list[dict[str, Any]]) -> list[_Start]:
    """Return the starts in a log. One without a valid time counts as the earliest."""
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] == "resumed":  # logged before the start that it is of, and not shown
            continue
        if event["event"] == "started" or not groups:
            groups.append([])
        groups[-1].append(event)
    times = [[time for event in group if (time := _number(event, "time"))] or [0.0] for group in groups]
    return [_Start(group, min(each), max(each)) for group, each in zip(groups, times, strict=True)]


def _read_events(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the events of all complete lines. An incomplete last line is ignored."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        notes.append(f"{path}: can't be read: {error.strerror}")
        return []
    found = [(line, parse_event(line)) for line in lines]
    events = [event for _, event in found if event]
    n_broken = sum(event is None and line.endswith(b"\n") for line, event in found)
    if not events:
        notes.append(f"{path}: holds no line of a run")
    elif n_broken:
        notes.append(f"{path}: {n_broken} of {len(lines)} lines are not a run's and were left out")
    return events


class _Reading:
    """A pass over a log. Steps that a resumed run repeats replace the former ones."""

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
            elif kind in ("implementations", "ways"):  # "ways" until version 0.1
                self._run.implementations = _mapping(event.get(kind))
            elif kind in ("warning", "notice"):  # "notice" until version 0.1
                self._notice(str(event.get("text")))
            elif kind == "progress":
                self._progress(event)
            elif kind == "validated":
                self._validated(event)
            elif kind == "rank_times":
                self._rank_times(event)
            elif kind == "ended":
                self._run.exit_status = event
        if self._run.validations:
            self._take_classes(self._run.validations[-1])
        if self._n_unusable:
            what = f"{self._n_unusable} lines of progress or validation lack the epoch, the step or the error"
            self._run.notes.append(f"{log_of(self._run.folder)}: {what} and were left out")

    def _clock(self, event: dict[str, Any]) -> None:
        now = _number(event, "time")
        if (
            now is None or not 0 <= now < _YEAR_10000 or event["event"] == "resumed"
        ):  # logged before the start
            return
        if event["event"] == "started":
            self._started = now
        elif self._started is not None:
            self._run.seconds += max(0.0, now - max(self._started, self._run.last_time or 0.0))
        self._run.last_time = now

    def _start(self, event: dict[str, Any]) -> None:
        run = self._run
        run.n_starts += 1
        run.exit_status = None
        run.versions = _mapping(event.get("versions"))
        run.machine = _mapping(event.get("machine"))

    def _notice(self, text: str) -> None:
        """Record a warning; 'NAME: ...' changes the implementation of a part."""
        name, _, value = text.partition(": ")
        if name in self._run.implementations:
            self._run.implementations[name] = value

    def _progress(self, event: dict[str, Any]) -> None:
        epoch, step, n_steps = (_number(event, key) for key in ("epoch", "step", "n_steps"))
        if not epoch or not step or not n_steps:
            self._n_unusable += 1
            return
        run, place = self._run, epoch - 1 + step / n_steps
        while run.points and run.points[-1].epochs >= place:
            run.points.pop()
        self._drop_epochs(epoch)
        per_20 = _number(event, "seconds_per_20")
        seconds = _by_phase(event.get("seconds"))
        run.points.append(
            Point(
                place,
                _number(event, "learning_rate"),
                _number(event, "loss" if "loss" in event else "cost"),  # the name in older versions
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
        while self._run.validations and self._run.validations[-1].epoch >= entry.epoch:
            self._run.validations.pop()
        self._run.validations.append(entry)

    def _take_classes(self, entry: Validation) -> None:
        self._run.classes_epoch, self._run.answers = entry.epoch, _answers(entry.event)
        self._run.columns, self._run.means = _columns(entry.event), _mapping(entry.event.get("means"))

    def _rank_times(self, event: dict[str, Any]) -> None:
        times = _epoch_times(event)
        if times is None:
            self._run.notes.append(f"{log_of(self._run.folder)}: damaged times of trainers were left out")
            return
        self._drop_epochs(times.epoch)
        self._run.rank_times.append(times)

    def _drop_epochs(self, epoch: float) -> None:
        """Drop what former starts have recorded of this epoch and of later ones."""
        for entries in (self._run.validations, self._run.rank_times):
            while entries and entries[-1].epoch >= epoch:
                entries.pop()


def _read_config(run: RunLog) -> None:
    path = run.folder / "config.yaml"
    try:
        run.config = configuration.with_new_names(configuration.read_yaml(path).values)
    except UserError as error:
        run.notes.append(str(error))
    if not isinstance(run.config.get("devices", []), list):
        run.notes.append(f"{path}: devices must be a list, not {run.config.pop('devices')!r}")


def _find_checkpoint(run: RunLog) -> None:
    """Find the newest valid checkpoint, which also has the validation of epochs before this run."""
    try:
        run.checkpoint, notices = checkpoint_files.find_checkpoint(run.folder, "latest")
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
    means = {**_mapping(values.get("means")), **values}  # a checkpoint has the means beside the loss
    names = ("mean_average_precision", "macro_f1", "label_error")
    of_labels = {name: _number(means, name) for name in names} if error is None else {}
    if not epoch or (error is None and of_labels["mean_average_precision"] is None):
        return None
    loss, top5 = _number(values, "loss"), _number(values, "error_top5")
    monitored = {name: value for name in HIGHER_IS_BETTER if (value := _number(means, name)) is not None}
    return Validation(int(epoch), loss, error, top5, monitored=monitored, event=values, **of_labels)


def _columns(event: dict[str, Any]) -> dict[str, list[float]]:
    """Return the metrics of each class with `task: multilabel`; {} without, or if they are damaged."""
    columns = _mapping(event.get("classes"))
    if "average_precision" not in columns:
        return {}
    names = ("support", "precision", "recall", "f1", "average_precision")
    lists = [columns.get(name) for name in names]
    if not all(isinstance(each, list) and len(each) == len(columns["average_precision"]) for each in lists):
        return {}
    numbers = [[_number({"": value}, "") for value in each] for each in lists if each]
    known = [[value for value in each if value is not None] for each in numbers]
    return dict(zip(names, known, strict=True)) if known == numbers else {}


def _kind(times: EpochTimes) -> tuple[int, int]:
    """Return the numbers of trainers and of hosts; only times of equal kinds are added."""
    return len(times.ranks), times.n_hosts


def _epoch_times(event: dict[str, Any]) -> EpochTimes | None:
    """Return all trainers' times of an epoch; None if the line is damaged."""
    epoch, n_steps, seconds = (_number(event, key) for key in ("epoch", "n_steps", "seconds"))
    values = event.get("ranks")
    if not epoch or n_steps is None or seconds is None or not isinstance(values, list):
        return None
    ranks = [_times_of_rank(rank, _mapping(each), n_steps) for rank, each in enumerate(values)]
    whole = [each for each in ranks if each]
    n_hosts = int(_number(event, "n_hosts") or 1)
    if not 1 <= n_steps < 1 << 53 or not 1 <= n_hosts <= len(whole) or len(whole) < len(ranks):
        return None
    if any(each.excess.keys() != set(PHASES) - set(waiting_phases(n_hosts)) for each in whole):
        return None
    return EpochTimes(int(epoch), int(n_steps), seconds, whole, n_hosts=n_hosts)


def _times_of_rank(rank: int, values: dict[str, Any], n_steps: float) -> RankTimes | None:
    n_last, waited = _number(values, "n_last"), _number(values, "waited")
    excess, seconds = (_numbers(_by_phase(values.get(key))) for key in ("excess", "seconds"))
    if n_last is None or waited is None or not excess or seconds.keys() != set(PHASES):
        return None
    return RankTimes(rank, int(n_last), waited, excess, seconds) if 0 <= n_last <= n_steps else None


def _by_phase(values: Any) -> dict[str, Any]:
    """Return values by phase, under today's names of phases."""
    return {_OLD_PHASES.get(phase, phase): value for phase, value in _mapping(values).items()}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a mapping by phase, without what else it holds."""
    found = {phase: _number(values, phase) for phase in PHASES}
    return {phase: number for phase, number in found.items() if number is not None}


def _answers(event: dict[str, Any]) -> AnswerCounts | None:
    """Return the counts of a validation; None if the log has none, or damaged ones."""
    columns, triples = _mapping(event.get("classes")).get("support"), event.get("confusion")
    if not isinstance(columns, list) or not isinstance(triples, list) or not triples:
        return None
    n_classes = len(columns)
    for triple in triples:
        whole = isinstance(triple, list) and len(triple) == 3 and all(type(n) is int for n in triple)
        if not whole or not all(0 <= n < n_classes for n in triple[:2]) or not 0 < triple[2] < 1 << 53:
            return None
    return AnswerCounts.joined(n_classes, np.array(triples))


def _number(values: dict[str, Any], key: str) -> float | None:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
