"""What a run shows and logs. The launcher owns the terminal; trainers only send it messages."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lockstep.config import Config
from lockstep.messages import Progress, Saved, Tick, Validated


class Console:
    """Prints progress (with a bar on a terminal) and appends every line of it to <folder>/log.jsonl."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._config = config
        self._log = open(folder / "log.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._bar: tqdm[Any] | None = None
        self.last_validation: Validated | None = None
        self.last_saved: Saved | None = None

    def take(self, message: Any) -> None:
        """Shows one message of trainer 0."""
        if isinstance(message, Tick):
            self._move_bar(message)
            return
        if isinstance(message, Progress):
            self.say(self._progress_line(message))
        elif isinstance(message, Validated):
            self.last_validation = message
            self._end_bar()
            self.say(
                f"epoch {message.epoch}/{self._config.n_epochs}: {validation_text(message)} "
                f"({message.seconds:.1f} s)"
            )
        elif isinstance(message, Saved):
            self.last_saved = message
            self.say(f"saved {message.path}")
        self.log(type(message).__name__.lower(), asdict(message))

    def log(self, event: str, values: dict[str, Any]) -> None:
        """Appends one JSON line, flushed, so that a report can be made while the run goes on."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def say(self, text: str) -> None:
        tqdm.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        self._end_bar()
        self._log.close()

    def _progress_line(self, progress: Progress) -> str:
        parts = [f"epoch {progress.epoch} step {progress.step}/{progress.n_steps}: cost {progress.cost:.4f}"]
        if progress.error is not None:
            parts.append(f"error {progress.error:.2%}")
        parts.append(f"{progress.images_per_second:,.0f} images/s")
        parts.append(f"time per 20 iterations {progress.seconds_per_20:.2f} s")
        total = sum(progress.seconds.values()) or 1.0
        split = " ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in progress.seconds.items())
        return f"{', '.join(parts)} ({split})"

    def _move_bar(self, tick: Tick) -> None:
        if not sys.stderr.isatty():
            return
        title = f"epoch {tick.epoch}/{self._config.n_epochs}" + (" validation" if tick.stage == "val" else "")
        if self._bar is None or self._bar.desc != f"{title}: ":
            self._end_bar()
            self._bar = tqdm(total=tick.n_steps, desc=title, unit="step", leave=False, initial=tick.step)
        self._bar.update(tick.step - self._bar.n)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def validation_text(validated: Validated) -> str:
    return (
        f"validation error {validated.error_top1:.2%} top-1, {validated.error_top5:.2%} top-5, "
        f"loss {validated.loss:.4f} on {validated.n_images:,} images"
    )
