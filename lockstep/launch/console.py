"""What a run shows and logs. The launcher owns the terminal; trainers only send it messages.

Showing is done by a thread: a reader that stalls (Ctrl-S, a pager) or goes away must not hold up the run.
"""

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lockstep.comm.messages import Notice, Progress, Saved, Started, Tick, Validated
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch.processes import Ending
from lockstep.launch.scalars import Scalars

FLUSH_SECONDS = 5.0  # how long the end of a run waits for a reader that stalls
_BACKLOG = 100  # waiting lines above which the progress bar is not moved
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"


class Console:
    """Prints progress (with a bar on a terminal) and appends every line of it to a log.

    log: its path, in the run's folder. steps_per_epoch: of the optimizer. On other hosts than host 0 the log
    has it all, the terminal only what host 0's does not have.
    """

    def __init__(self, log: Path, config: Config, steps_per_epoch: int) -> None:
        self._config, self._leads = config, not config.host
        self._scalars = Scalars(log.parent, steps_per_epoch) if config.tensorboard and self._leads else None
        self._path = log
        try:
            self._log = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}") from error
        self._bar: tqdm[Any] | None = None
        self._bar_title = ""
        self._bar_numbers = ""  # of the last line of progress
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._show_all, daemon=True)
        self._thread.start()
        self.last_validation: Validated | None = None
        self.last_saved: Saved | None = None

    def take(self, message: Any) -> None:
        """Shows and logs one message of trainer 0."""
        if isinstance(message, Tick):
            if self._leads and self._waiting.qsize() < _BACKLOG:
                self._waiting.put(lambda: self._move_bar(message))
            return
        if isinstance(message, Started):
            self.log("ways", {"ways": message.ways})
            return
        if isinstance(message, Notice):
            self.say(f"note: {message.text}")
        elif isinstance(message, Progress):
            self._waiting.put(lambda: self._show_numbers(message))
            self._say_first(self._progress_line(message))
        elif isinstance(message, Validated):
            self.last_validation = message
            epochs = f"epoch {message.epoch}/{self._config.n_epochs}"
            self._waiting.put(self._end_bar)
            self._say_first(f"{epochs}: {validation_text(message)} ({message.seconds:.1f} s)")
        elif isinstance(message, Saved):
            self.last_saved = message
            self.say(f"saved {message.path}")
        self.log(type(message).__name__.lower(), asdict(message))
        if self._scalars:
            self._scalars.take(message)

    def log(self, event: str, values: dict[str, Any]) -> None:
        """Appends one JSON line, flushed, so that a report can be made while the run goes on."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        try:
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}") from error

    def log_ending(self, ending: Ending) -> None:
        """The last line of the log.

        Where the run has failed already, perhaps for the same full disk, that is the news.
        """
        try:
            self.log("ended", asdict(ending))
        except UserError:
            if ending.code == 0:
                raise

    def say(self, text: str) -> None:
        """Prints a line on standard output, above the bar."""
        self._waiting.put(lambda: show(text, "stdout"))

    def _say_first(self, text: str) -> None:
        """What is the same on all hosts, on the first of them."""
        if self._leads:
            self.say(text)

    def close(self, last_words: str, stream: str) -> bool:
        """Ends the bar and says the last words of the run. Returns whether all has been shown."""
        self._waiting.put(self._end_bar)
        self._waiting.put(lambda: show(last_words, stream))
        self._waiting.put(None)
        with suppress(OSError):  # what it could not write, `log` has said
            self._log.close()
        if self._scalars:
            self._scalars.close()
        self._thread.join(FLUSH_SECONDS)
        return not self._thread.is_alive()

    def last_words(self, ending: Ending) -> str:
        """On success the result, otherwise the one message that says why the run ended, last."""
        if ending.message:
            return f"{ending.traceback}lockstep: {ending.message}"
        if ending.code:
            saved = f"{self.last_saved.path}; resume_train=True goes on" if self.last_saved else "nothing"
            return f"lockstep: stopped as asked; saved {saved}"
        assert self.last_validation, "a run validates at least once"
        return f"done: {validation_text(self.last_validation)}; files are in {self._path.parent}"

    def _show_all(self) -> None:
        while (action := self._waiting.get()) is not None:
            action()

    def _progress_line(self, progress: Progress) -> str:
        parts = [f"epoch {progress.epoch} step {progress.step}/{progress.n_steps}: loss {progress.loss:.4f}"]
        if progress.error is not None:
            parts.append(f"training error {progress.error:.2%}")
        parts.append(f"{progress.images_per_second:,.0f} images/s")
        parts.append(f"time per 20 iterations {progress.seconds_per_20:.2f} s")
        total = sum(progress.seconds.values()) or 1.0
        split = " ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in progress.seconds.items())
        return f"{', '.join(parts)} ({split})"

    def _move_bar(self, tick: Tick) -> None:
        if sys.stderr is None or not sys.stderr.isatty():
            return
        validation = " validation" if tick.stage == "val" else ""
        title = f"epoch {tick.epoch}/{self._config.n_epochs}{validation}"
        if self._bar is None or self._bar_title != title:
            self._end_bar()
            self._bar_title = title
            columns, rows = shutil.get_terminal_size()  # 80 x 24 where a terminal says that it has none
            self._bar = tqdm(
                desc=title,
                total=tick.n_steps,
                initial=tick.step - 1,
                unit="step",
                leave=False,
                ncols=columns,
                nrows=rows,
                bar_format=_BAR,
                postfix="" if validation else self._bar_numbers,
            )
        self._bar.update(tick.step - self._bar.n)

    def _show_numbers(self, progress: Progress) -> None:
        error = "" if progress.error is None else f", error {progress.error:.1%}"
        self._bar_numbers = f"loss {progress.loss:.3f}{error}, {progress.images_per_second:,.0f} images/s"
        if self._bar is not None:
            self._bar.set_postfix_str(self._bar_numbers)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def show(text: str, stream: str) -> None:
    """Prints to 'stdout' or 'stderr'; where that is closed or full, no more: training goes on."""
    file = getattr(sys, stream)
    if file is None:  # closed before the program began
        return
    try:
        tqdm.write(text, file=file)
        file.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())  # so that Python's own flush at its end does not fail again
        os.close(nowhere)


def validation_text(validated: Validated) -> str:
    return (
        f"validation error {validated.error_top1:.2%} top-1, {validated.error_top5:.2%} top-5, "
        f"loss {validated.loss:.4f} on {validated.n_images:,} images"
    )
