"""The record of finished tasks, from which an interrupted run resumes."""

import hashlib
import io
import json
import time
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.files import write_bytes
from preprocessing.sums import PixelSums
from preprocessing.tasks import Record, Task

NAME = ".journal.npz"
_SHARE = 0.03  # largest share of time for writing the journal


class Journal:
    """The results of finished tasks and the sums of their images, in one file that is replaced atomically.

    A task that finished after the last write is repeated, with the same result. A task with files that could
    not be read is not written, so the next run tries them again.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], tasks: list[Task], size: int) -> None:
        self._path = folder / NAME
        self._settings = settings
        self._digest = _digest(tasks)
        self._next_writing = 0.0
        self._is_whole = True
        self._unwritten: set[str] = set()
        self._unwritten_sums = PixelSums(size)
        self.records: dict[str, Record] = {}
        self.sums = PixelSums(size)

    def load(self) -> None:
        """Load the journal of an earlier run, if any. Raise UserError if it had other settings or images."""
        if not self._path.exists():
            return
        again = f"; give those again, or remove {self._path.parent} to begin anew"
        try:
            with np.load(self._path, allow_pickle=False) as file:
                content = json.loads(file["content"].tobytes())
                total, squares = file["total"], file["squares"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{self._path}: can't be read ({error}); remove its folder to start again"
            ) from error
        for key, value in content["settings"].items():
            if self._settings.get(key) != value:
                raise UserError(
                    f"{self._path.parent}: was started with {key} {value}, "
                    f"not {self._settings.get(key)}{again}"
                )
        if content["tasks"] != self._digest:
            raise UserError(f"{self._path.parent}: was started with other images{again}")
        self.records = {key: Record.from_json(record) for key, record in content["records"].items()}
        self.sums.total, self.sums.squares, self.sums.count = total, squares, content["count"]

    def add(self, task: Task, record: Record, sums: PixelSums | None) -> None:
        """Record a finished task, and write the journal now and then. A repeated task counts once."""
        self._is_whole = False  # Ctrl-C may come between the sums and the record
        if task.key not in self.records:
            if sums:
                self.sums.merge(sums)
            if any(bad.is_unread for bad in record.bad):
                self._unwritten.add(task.key)
                self._unwritten_sums.merge(sums or PixelSums(len(self.sums.total)))
        self.records[task.key] = record
        self._is_whole = True
        if time.monotonic() >= self._next_writing:
            self.write()

    def write(self) -> None:
        """Write the journal. If the disk is full, keep the former file and raise UserError.

        An interrupted `add` is not written: its images would count twice when its task is repeated.
        """
        if not self._is_whole:
            return
        begin = time.monotonic()
        sums = self.sums.without(self._unwritten_sums)
        records = {key: asdict(record) for key, record in self.records.items() if key not in self._unwritten}
        content = {
            "settings": self._settings,
            "tasks": self._digest,
            "count": sums.count,
            "records": records,
        }
        text = np.frombuffer(json.dumps(content).encode(), np.uint8)
        file = io.BytesIO()
        np.savez(file, content=text, total=sums.total, squares=sums.squares)
        write_bytes(self._path, file.getvalue())
        now = time.monotonic()
        self._next_writing = now + (now - begin) / _SHARE

    def n_bad(self) -> int:
        """Return the number of unusable images so far."""
        return sum(len(record.bad) for record in self.records.values())

    def remove(self) -> None:
        """Remove the journal's file. Raise OSError if that fails."""
        self._path.unlink()


def _digest(tasks: list[Task]) -> str:
    """Return a digest of the names and labels of all images in their order."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.key}\n".encode())
        for name, label in zip(task.source.names, task.source.labels, strict=True):
            digest.update(f"{label} {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
