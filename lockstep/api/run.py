"""A run's results, read from its folder."""

import heapq
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import objects
from lockstep.api import commands
from lockstep.config import read_run, resolve
from lockstep.config.tasks import MONITORED, monitor_of
from lockstep.errors import UserError
from lockstep.files import parse_event, program_folder
from lockstep.objects import Kind
from lockstep.runs.checkpoint_files import check_epoch, find_checkpoint, read_state, records
from lockstep.runs.folder import logs_of
from lockstep.runs.metrics import best_epoch, has_ended

if TYPE_CHECKING:
    from torch import nn

Event = dict[str, Any]
RECORDS = ("progress", "validated")  # events that a callback gets


class Run:
    """The results of a run, read from its folder.

    Attributes:
        folder: The run's folder, as an absolute path.
        complete: True if all epochs were trained, or `patience` ended the run.
    """

    def __init__(
        self, folder: str | Path, complete: bool | None = None, passed: Mapping[Kind, Any] | None = None
    ) -> None:
        self.folder = checked_folder(folder)
        self.complete = _is_complete(self.folder) if complete is None else complete
        self._passed = dict(passed or {})  # the network and datasets that are no names

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, complete={self.complete})"

    @property
    def history(self) -> list[Event]:
        """One record for each validated epoch: epoch, loss, errors, n_images, seconds, metrics by class.

        A run that resumed from an older checkpoint has taken back the epochs after it. If
        `load_epoch` made this folder, the epochs up to that one are in the folder that it continues.
        """
        found: list[Event] = []
        # A host may have had several numbers. Times are compared as text, as damaged ones may be anything.
        logs = [[event for event, _ in events(log, 0)] for log in logs_of(self.folder)]
        for event in heapq.merge(*logs, key=lambda event: str(event.get("time"))):
            if event["event"] not in RECORDS or not isinstance(event.get("epoch"), int):
                continue
            while found and found[-1]["epoch"] >= event["epoch"]:
                found.pop()
            if event["event"] == "validated":
                found.append(event)
        return found

    @property
    def best(self) -> Event:
        """The record of the epoch in `history` that is best by the key `monitor`; of several, the earliest.

        Raises:
            UserError: No epoch has been validated yet.
        """
        history = self.history
        if not history:
            action = "Resume the run" if records(self.folder) else "It has saved nothing. Train again"
            raise UserError(f"{self.folder}: no epoch is complete yet. {action}.")
        config, _ = resolve([read_run(self.folder / "config.yaml")])
        values = [{**record.get("means", {}), **record} for record in history]
        best = best_epoch(values, monitor_of(config)) or best_epoch(values, MONITORED[config.task][0])
        return next(record for record in history if record["epoch"] == best)

    def checkpoint(self, epoch: int | str = "latest") -> Path:
        """Return the file of tensors that `model` and `predict` use with the same `epoch`.

        Raises:
            UserError: There is no such checkpoint.
        """
        return find_checkpoint(self.folder, epoch)[0].path

    def model(self, epoch: int | str = "latest") -> "nn.Module":
        """Return the network of a checkpoint on the CPU, in evaluation mode.

        Args:
            epoch: The checkpoint's epoch, "best" (by the key `monitor`) or "latest" (the newest whole one).

        Raises:
            UserError: There is no whole checkpoint, or the network cannot be built.
        """
        import torch  # a program that only trains needs no torch of its own

        from lockstep.export.__main__ import load_trained

        if str(program_folder()) not in sys.path:  # its networks come after everything of the caller's
            sys.path.append(str(program_folder()))
        # The caller may have another default device, such as meta, where weights are lost.
        with objects.available(self._passed), torch.device("cpu"):
            return load_trained(self.folder, epoch).model

    def predict(
        self, image: str | Path, epoch: int | str = "latest", threshold: float | None = None
    ) -> list[tuple[str, float]]:
        """Return the most probable classes of an image file and their probabilities, best first.

        Args:
            image: The file.
            epoch: As of `model`.
            threshold: With `task: multilabel`, the least probability of the classes to return; by default
                the key `threshold` of the run.

        Raises:
            UserError: The file or the run's checkpoint cannot be used.
        """
        check_epoch(epoch)
        if not isinstance(image, str | os.PathLike):
            raise UserError(f"image: must be the path of an image file, not {type(image).__name__}")
        if Path(image).is_dir():
            raise UserError(f"{image}: is a folder. Name one image; `lockstep predict` takes folders.")
        command = ["predict", "--run", str(self.folder), "--epoch", str(epoch), "--json"]
        command += [] if threshold is None else ["--threshold", str(threshold)]
        command += ["--", str(image)]
        with objects.pickled(self._passed) as passed:
            environment = commands.environment() | passed
            done = subprocess.run(
                commands.lockstep_command(command), capture_output=True, text=True, env=environment
            )
        if done.returncode:
            raise UserError(commands.without_name(commands.last_line(done.stderr)))
        answers = json.loads(done.stdout.splitlines()[-1])["answers"]
        return [(answer["class"], answer["probability"]) for answer in answers]


def checked_folder(folder: Any) -> Path:
    """Return an absolute path. Raise UserError if the value is none."""
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"folder: must be the path of a run's folder, not {type(folder).__name__}")
    return Path(folder).absolute()


def _is_complete(folder: Path) -> bool:
    """Return whether no epoch is left, by a run's newest checkpoint; False without one that can be read."""
    try:
        state = read_state(records(folder)[-1])
        config, _ = resolve([read_run(folder / "config.yaml")])
    except (IndexError, OSError, UserError):
        return False
    is_last = state.is_complete and state.epoch >= config.n_epochs
    return is_last or has_ended(state.val_record, monitor_of(config), config.patience)


def events(log: Path, position: int) -> Iterator[tuple[Event, int]]:
    """Yield the whole events of a log from a byte position on, each with the position behind it."""
    try:
        with open(log, "rb") as file:
            file.seek(position)
            content = file.read()
    except OSError:
        return
    for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        position += len(line)
        if event := parse_event(line):
            yield event, position
