"""Makes a dataset folder out of tasks: in parallel, beside its final place, and going on where an earlier run
was."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.manifest import differing
from preprocessing.bars import progress_bar
from preprocessing.finish import Outcome, write_rest
from preprocessing.journal import Journal
from preprocessing.tasks import Target, Task, make_files
from preprocessing.workers import in_parallel

_SPARE = 64 * 2**20  # bytes for labels, lists and the journal, on top of the images


@dataclass(frozen=True)
class Job:
    """A dataset folder to make. `settings` go into the manifest, and must be the same when an interrupted job
    goes on; `facts` go into the manifest only."""

    folder: Path
    target: Target  # its folder is `unfinished`
    tasks: list[Task]
    classes: list[str]
    class_names: list[str]
    settings: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)


def unfinished(folder: Path) -> Path:
    """Where a dataset folder is made before it gets its name."""
    return folder.with_name(f".{folder.name}.unfinished")


def build(job: Job, n_workers: int, max_errors: int) -> Outcome:
    """Makes the folder, or the rest of it. Raises UserError; what is done by then stays for the next run."""
    if job.folder.exists():
        raise UserError(f"{job.folder}: is there already; remove it, or name another target")
    settings = {
        **job.settings,
        "size": job.target.size,
        "batch": job.target.batch,
        "layout": job.target.layout,
    }
    settings["split"] = job.target.parts
    journal = Journal(job.target.folder, settings, job.tasks, job.target.size)
    journal.load()
    _check_errors(journal, max_errors)
    remaining = _remaining(job, journal)
    _check_space(job, remaining)
    for folder in (*(job.target.split_folder(split) for split in ("train", "val")), "labels", "misc"):
        (job.target.folder / folder).mkdir(parents=True, exist_ok=True)
    with _alone_in(job.target.folder):
        _remove_leftovers(job.target.folder)
        try:
            _do(job, journal, remaining, n_workers, max_errors)
        finally:
            journal.write()
        facts = {**settings, **job.facts}
        outcome = write_rest(job.target, job.tasks, journal, (job.classes, job.class_names), facts)
        journal.remove()
        job.target.folder.rename(job.folder)
    return outcome


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Raises UserError when another process is at work in the folder. A killed one is not: the lock goes with
    it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another process is at work in it; wait for it, or stop it") from error
        yield
    finally:
        os.close(descriptor)


def _do(job: Job, journal: Journal, remaining: list[Task], n_workers: int, max_errors: int) -> None:
    n_images = sum(len(task.source.labels) for task in job.tasks)
    n_done = n_images - sum(len(task.source.labels) for task in remaining)
    work = partial(make_files, target=job.target)
    with progress_bar(n_images, "image", n_done) as bar:
        results = in_parallel(work, remaining, min(n_workers, max(len(remaining), 1)))
        with closing(results):
            for task, (record, sums) in results:
                journal.add(task, record, sums)
                bar.update(len(task.source.labels))
                for bad in record.bad:
                    bar.write(f"bad picture: {bad.place}: {bad.reason}")
                _check_errors(journal, max_errors)


def _check_errors(journal: Journal, max_errors: int) -> None:
    if journal.n_bad() > max_errors:
        last = [bad for record in journal.records.values() for bad in record.bad][-1]
        raise UserError(
            f"{last.place}: {last.reason}; that makes {journal.n_bad()} bad pictures, more than "
            f"--max-errors {max_errors} (a higher one goes on)"
        )


def _remaining(job: Job, journal: Journal) -> list[Task]:
    """The tasks to do: all but those whose files are there and have their checksums."""
    sums = {entry["file"]: entry["sha256"] for record in journal.records.values() for entry in record.files}
    if not sums:
        return [task for task in job.tasks if task.key not in journal.records]
    print(f"going on: {len(journal.records)} of {len(job.tasks)} batches are done; checking them", flush=True)
    with progress_bar(len(sums), "file") as bar:
        wrong = set(differing(job.target.folder, sums, lambda name: bar.update()))
    return [
        task
        for task in job.tasks
        if task.key not in journal.records or wrong.intersection(job.target.names(task))
    ]


def _check_space(job: Job, remaining: list[Task]) -> None:
    per_image = job.target.size**2 * 3
    total = per_image * sum(len(task.source.labels) for task in job.tasks)
    needed = per_image * sum(len(task.source.labels) for task in remaining) + _SPARE
    folder = job.folder.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    print(f"the images take {total / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free in {folder}", flush=True)
    if needed > free:
        raise UserError(f"{folder}: has {free / 1e9:,.2f} GB free, {needed / 1e9:,.2f} GB are needed")


def _remove_leftovers(place: Path) -> None:
    """Temporary files of workers that were killed."""
    for path in [*place.glob("*/.*"), *place.glob(".journal-*")]:
        path.unlink()
