"""The run's output: lines on the terminal, a progress bar, and the log.

The launcher owns the terminal; trainers only send it messages. A thread prints, so that a reader that stalls
(Ctrl-S, a pager) or exits does not delay the run. A program that starts a launcher shows the progress bar
itself: it asks for the bar's states as lines of JSON.
"""

import json
import os
import queue
import shutil
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import TqdmExperimentalWarning, TqdmWarning, tqdm

from lockstep.comm.messages import (
    EpochTimes,
    LoaderRestarted,
    Progress,
    Saved,
    Started,
    Tick,
    Validated,
    WarningMessage,
)
from lockstep.config import Config, differences
from lockstep.config.rules import discarded_replicas
from lockstep.config.tasks import is_multilabel
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.launch.children import ExitStatus
from lockstep.launch.scalars import Scalars
from lockstep.loading.orders import Orders
from lockstep.runs import stragglers
from lockstep.runs.checkpoint_files import records
from lockstep.runs.folder import RunFolder
from lockstep.runs.state import Checkpoint

_BAR_VARIABLE = "LOCKSTEP_BAR"  # environment variable: print the states as lines, for another program's bar
SEND_BAR = {_BAR_VARIABLE: "1"}
_BAR_MARK = "\x1e"  # begins a line of JSON among others (RFC 7464)
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
FLUSH_SECONDS = 5.0  # for which the end of a run waits for a reader that stalls
COLUMNS = 100  # maximum length of a line
_BACKLOG = 100  # queued lines above which the progress bar is not moved
_NOTABLE_SHARE = 0.1  # of the time, in a phase other than compute
_NOT_SAVED = "host 0 saved nothing"
_OF_CLASSES = ("error_top1", "error_top5", "confusion")  # values of a validation with one class per image


class Console:
    """A printer of progress, with a bar on a terminal, that appends every event to a log.

    On hosts other than host 0 the log has everything, the terminal only what differs from host 0. An epoch of
    fewer than 1.5 print_freq steps has a single line, of all its steps, printed after its validation.

    Args:
        log: The log's path, in the run's folder.
        steps_per_epoch: Optimizer steps per epoch.
        writes: Whether this host saves checkpoints.

    Raises:
        UserError: The log can't be written.
    """

    def __init__(self, log: Path, config: Config, steps_per_epoch: int, writes: bool) -> None:
        self._writes = writes
        self._is_short = config.is_short(steps_per_epoch)
        self._deferred: Progress | None = None  # a short epoch's line, until its validation
        self._config, self._is_first_host = config, not config.host_rank
        self._error_name = "label error" if is_multilabel(config) else "error"
        self._scalars = (
            Scalars(log.parent, steps_per_epoch) if config.tensorboard and self._is_first_host else None
        )
        self._path = log
        try:
            self._log = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
            if _ends_torn(self._path):
                self._log.write("\n")
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}") from error
        self._bar = ProgressBar()
        self._loss: float | None = None  # shown in the bar
        self._straggler: tuple[int, int, str] | None = None  # epoch, rank and cause, of the last such line
        self._run_start: tuple[float, float] | None = None  # the first tick's time, and epochs done by then
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print_queue, daemon=True)
        self._thread.start()
        self.last_validation: Validated | None = None
        self.last_saved: Saved | None = None
        self.start: Path | None = None  # the checkpoint that the run resumes from

    def take(self, message: Any) -> None:
        """Print and log one message of trainer 0."""
        if isinstance(message, Tick):
            if self._is_first_host and self._queue.qsize() < _BACKLOG:
                self._queue.put(lambda: self._move_bar(message))
            return
        if isinstance(message, Started):
            self.log("implementations", {"implementations": message.implementations})
            return
        if isinstance(message, WarningMessage):
            self.say(f"note: {message.text}")
            self.log("warning", {"text": message.text})
            return
        if isinstance(message, LoaderRestarted):
            left = f"restarts left: {message.restarts_left}"
            self.say(f"note: {message.failure}; it is started again ({left})")
            self.log("loader_restarted", asdict(message))
            return
        if isinstance(message, EpochTimes):
            self.log("rank_times", asdict(message))
            return
        if isinstance(message, Progress):
            self._loss = message.loss
            if self._is_short:
                if self._deferred:  # its epoch was not validated
                    self._say_progress(self._deferred)
                self._deferred = message
            else:
                self._say_progress(message)
        elif isinstance(message, Validated):
            self.last_validation = message
            self._queue.put(self._bar.close)
            training = self._deferred
            self._say_on_first_host(self._epoch_line(message))
            if training:
                self._say_straggler(training)
        elif isinstance(message, Saved):
            self.last_saved = message
            self.say(f"saved {message.path}")
        values = asdict(message)
        if isinstance(message, Validated) and message.error_top1 is None:
            values = {key: value for key, value in values.items() if key not in _OF_CLASSES}
        self.log(type(message).__name__.lower(), values)
        if self._scalars:
            self._scalars.take(message)

    def log(self, event: str, values: dict[str, Any]) -> None:
        """Append one JSON line to the log, flushed, so that reports can be made during the run."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        try:
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}") from error

    def log_ending(self, exit_status: ExitStatus) -> ExitStatus:
        """Write the last line of the log, and return how the run ended: an error only if it had none.

        The run's own failure, perhaps caused by the same full disk, is the one to report.
        """
        try:
            self.log("ended", asdict(exit_status))
        except UserError as error:  # `close` prints it, after the lines that still wait
            return exit_status if exit_status.code else ExitStatus(error.code, str(error))
        return exit_status

    def say(self, text: str, stream: str = "stdout") -> None:
        """Print a line on 'stdout' or 'stderr', above the bar."""
        self._queue.put(lambda: show(text, stream))

    def _say_progress(self, progress: Progress) -> None:
        self._say_on_first_host(progress_line(progress, self._error_name))
        self._say_straggler(progress)

    def _say_straggler(self, progress: Progress) -> None:
        """Print who makes the others wait, once an epoch and when that changes."""
        straggler = progress.straggler
        if straggler is None:
            return
        key = progress.epoch, straggler.rank, straggler.cause
        if key != self._straggler:
            self._say_on_first_host(f"  {stragglers.describe(straggler)}")
        self._straggler = key

    def _say_on_first_host(self, text: str) -> None:
        """Print a line that is the same on all hosts on the first of them only."""
        if self._is_first_host:
            self.say(text)

    def close(self, last_line: str, stream: str) -> bool:
        """Remove the bar and print the run's last line. Return whether everything was printed in time."""
        self._queue.put(self._bar.close)
        if self._deferred:
            self._say_progress(self._deferred)
        self._queue.put(lambda: show(last_line, stream))
        self._queue.put(None)
        with suppress(OSError):  # `log` has raised this error before
            self._log.close()
        if self._scalars:
            self._scalars.close()
        self._thread.join(FLUSH_SECONDS)
        return not self._thread.is_alive()

    def last_line(self, exit_status: ExitStatus) -> str:
        """Return the result on success, otherwise the one message that says why the run ended."""
        if exit_status.message:
            return f"{exit_status.traceback}lockstep: {exit_status.message}"
        if exit_status.code:
            return f"lockstep: stopped as asked; {self.describe_saved()}"
        assert self.last_validation, "a run validates at least once"
        return f"done: {validation_text(self.last_validation)}; files are in {self._path.parent}"

    def take_saved(self, path: Path) -> None:
        """Show and log a checkpoint on the disk, unless that was done or the run has resumed from it."""
        if path != self.start and Saved(str(path)) != self.last_saved:
            self.take(Saved(str(path)))

    def describe_saved(self) -> str:
        """Return what a run that was stopped has saved, and which host has saved it."""
        if self.last_saved:
            return f"saved {self.last_saved.path}; resume_train=True resumes it"
        if not self._writes:
            newest = [record.stem for record in records(self._path.parent)][-1:]
            return f"host 0 saved {newest[0]}; resume_train=True resumes it" if newest else _NOT_SAVED
        return f"saved nothing new; {self.start} is unchanged" if self.start else "saved nothing"

    def _print_queue(self) -> None:
        while (action := self._queue.get()) is not None:
            with suppress(OSError):  # the bar raises it when the terminal is closed
                action()

    def _epoch_line(self, validated: Validated) -> str:
        """Return an epoch's line: its validation, and for a short epoch its training too."""
        training, self._deferred = self._deferred, None
        if training is None:
            epochs = f"epoch {validated.epoch}/{self._config.n_epochs}: "
            return _fit([epochs, *_validation_parts(validated), f" ({validated.seconds:.1f} s)"])
        parts = [f"epoch {validated.epoch}: loss {training.loss:.3f}"]
        if training.error is not None:
            parts.append(f", {self._error_name} {training.error:.2%}")
        parts.append(f"; validation loss {validated.loss:.3f}, {_main_results(validated)}")
        if validated.error_top5 is not None:
            parts.append(f", top-5 {validated.error_top5:.2%}")
        return _fit([*parts, f"; {training.images_per_second:,.0f} images/s"])

    def _move_bar(self, tick: Tick) -> None:
        if not sends_bar() and (sys.stderr is None or not sys.stderr.isatty()):
            return
        validation = " validation" if tick.stage == "val" else ""
        title = f"epoch {tick.epoch}/{self._config.n_epochs}{validation}"
        state = BarState(title, tick.step, tick.n_steps, self._bar_numbers(tick))
        if sends_bar():
            show(bar_line(state), "stdout")
        else:
            self._bar.move(state)

    def _bar_numbers(self, tick: Tick) -> str:
        """Return the time left in the run, estimated from its mean speed so far, and the training loss."""
        now = time.monotonic()
        done = float(tick.epoch) if tick.stage == "val" else tick.epoch - 1 + tick.step / tick.n_steps
        if self._run_start is None:
            self._run_start = now, done
        begin, done_before = self._run_start
        left = "?"
        if done > done_before:
            seconds = (now - begin) / (done - done_before) * (self._config.n_epochs - done)
            left = tqdm.format_interval(seconds)
        if tick.loss is not None:
            self._loss = tick.loss
        return f"run {left} left" + ("" if self._loss is None else f", loss {self._loss:.3f}")


def _ends_torn(path: Path) -> bool:
    """Return whether a file's last line is incomplete, after a full disk or a power cut."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def show(text: str, stream: str) -> None:
    """Print to 'stdout' or 'stderr'. If the stream is closed or full, discard this and later output."""
    file = getattr(sys, stream)
    if file is None:  # closed before the program started
        return
    encoding = file.encoding or "utf-8"  # io.StringIO has none
    try:
        tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=file)
        file.flush()
    except OSError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, file.fileno())  # so that Python's own flush at exit does not fail again
        os.close(devnull)


def progress_line(progress: Progress, error_name: str = "error") -> str:
    """Return a line of progress, with the phase that takes most time beside compute if that is notable."""
    parts = [f"epoch {progress.epoch} step {progress.step}/{progress.n_steps}: loss {progress.loss:.4f}"]
    if progress.error is not None:
        parts.append(f", {error_name} {progress.error:.2%}")
    parts.append(f", {progress.images_per_second:,.0f} images/s")
    parts.append(f", {progress.seconds_per_20:.2f} s per 20 iterations")
    total = sum(progress.seconds.values()) or 1.0
    overhead = {phase: seconds for phase, seconds in progress.seconds.items() if phase != "compute"}
    phase = max(overhead, key=lambda name: overhead[name], default="")
    if phase and overhead[phase] > _NOTABLE_SHARE * total:
        parts.append(f", {phase} {overhead[phase] / total:.0%}")
    return _fit(parts)


def validation_text(validated: Validated) -> str:
    """Return the results of a validation, for a line of output."""
    return "".join(_validation_parts(validated))


def _validation_parts(validated: Validated) -> list[str]:
    if validated.error_top1 is None:
        parts = [f"validation {_main_results(validated)}, micro F1 {validated.means['micro_f1']:.2%}"]
    else:
        top5 = "" if validated.error_top5 is None else f", {validated.error_top5:.2%} top-5"
        parts = [f"validation error {validated.error_top1:.2%} top-1{top5}"]
    return [*parts, f", loss {validated.loss:.4f}", f" on {validated.n_images:,} images"]


def _main_results(validated: Validated) -> str:
    """Return the top-1 error, or with `task: multilabel` the mean average precision and macro F1."""
    if validated.error_top1 is not None:
        return f"error {validated.error_top1:.2%}"
    means = validated.means
    return f"mAP {means['mean_average_precision']:.2%}, macro F1 {means['macro_f1']:.2%}"


def _fit(parts: list[str]) -> str:
    """Join the parts, without the last ones if the line would be longer than COLUMNS."""
    while len(parts) > 1 and len("".join(parts)) > COLUMNS:
        parts = parts[:-1]
    return "".join(parts)


def announce(console: Console, dataset: Dataset, run: RunFolder, config: Config, orders: Orders) -> None:
    """Print the configuration, the data, the devices, the checkpoint to resume from, and notes."""
    console.say(_describe_config(config, run.folder / "config.yaml"))
    n_train = len(dataset.train)
    host = f", host {config.host_rank} of {config.n_hosts}" if config.n_hosts > 1 else ""
    console.say(
        f"{n_train:,} training and {len(dataset.val):,} validation images, "
        f"{dataset.n_classes} classes; {len(config.devices)} trainer(s) on {', '.join(config.devices)}{host}"
    )
    if (step_size := orders.step_size("train")) > n_train:
        key = "global_batch_size" if config.global_batch_size else f"batch_size: {config.batch_size}"
        key += f", accumulate: {config.accumulate}" if config.accumulate > 1 else ""
        text = f"{key}: a step takes {step_size} images, the training set has {n_train}"
        console.say(f"note: {text}: each epoch is one step of fewer; a smaller one learns more")
    for note in run.notes:
        console.say(f"note: {note}")
    if run.start:
        _announce_resuming(console, run.start, config, orders)


def _announce_resuming(console: Console, start: Checkpoint, config: Config, orders: Orders) -> None:
    console.start, state = start.path, start.state
    console.say(f"resuming from {start.path} (epoch {state.epoch}, {state.position} images in)")
    previous = state.config.get("global_batch_size") or state.n_trainers * state.config["batch_size"]
    if previous != orders.minibatch_size:
        console.say("note: the global batch size differs from before; no image is lost or seen twice")
    if note := discarded_replicas(state.config.get("rule", ""), state.n_trainers, config):
        console.say(f"note: {note}")
    console.log("resumed", {"checkpoint": str(start.path)})


def _describe_config(config: Config, saved: Path) -> str:
    """Return the keys that differ from the defaults, and the file that has all keys.

    The devices are left out, because another line names them, and a dataset folder that is not used.
    """
    unused = {"devices", "data_folder"} if config.data else {"devices"}
    changed = {key: value for key, value in differences(config).items() if key not in unused}
    settings = ", ".join(f"{key}: {json.dumps(value, default=str)}" for key, value in changed.items())
    lines = textwrap.wrap(
        f"configuration, beside the defaults: {settings or 'nothing'}",
        COLUMNS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*lines, f"all keys are in {saved}"])


@dataclass(frozen=True)
class BarState:
    """The content of a bar: the part of the run, its steps, and the time left and loss as text."""

    title: str
    step: int
    n_steps: int
    numbers: str


def sends_bar() -> bool:
    """Return whether the launcher prints the bar's states as lines."""
    return _BAR_VARIABLE in os.environ


def bar_line(state: BarState) -> str:
    """Return a line that `read_bar_line` reads."""
    return _BAR_MARK + json.dumps(asdict(state))


def read_bar_line(line: str) -> BarState | None:
    """Return the state in a line of a launcher's output, or None if the line is for people."""
    return BarState(**json.loads(line[len(_BAR_MARK) :])) if line.startswith(_BAR_MARK) else None


class ProgressBar:
    """A bar for each part of a run: an epoch's training, its validation.

    Args:
        in_notebook: Show a notebook's widget, or text where the notebook has no widgets.
    """

    def __init__(self, in_notebook: bool = False) -> None:
        self._in_notebook = in_notebook
        self._bar: tqdm[Any] | None = None
        self._title = ""

    def move(self, state: BarState) -> None:
        """Show a state, with a new bar if its title is another."""
        if self._bar is None or self._title != state.title:
            self.close()
            self._title = state.title
            self._bar = self._begin(state)
        self._bar.set_postfix_str(state.numbers, refresh=False)
        self._bar.update(state.step - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _begin(self, state: BarState) -> "tqdm[Any]":
        options: dict[str, Any] = {
            "desc": state.title,
            "total": state.n_steps,
            "initial": state.step - 1,
            "unit": "step",
            "leave": False,
            "postfix": state.numbers,
            "bar_format": _BAR_FORMAT,
        }
        if self._in_notebook:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TqdmExperimentalWarning)
                warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets it falls back to text
                from tqdm.autonotebook import tqdm as notebook_bar

                return notebook_bar(**options)
        columns, rows = shutil.get_terminal_size()  # 80 x 24 if the terminal reports no size
        return tqdm(**options, ncols=columns, nrows=rows)
