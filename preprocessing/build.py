"""Makes a dataset folder out of tasks: in parallel, beside its final place, going on where it was left."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.manifest import differing
from lockstep.errors import UserError
from preprocessing.bars import progress_bar
from preprocessing.finish import Outcome, write_rest
from preprocessing.journal import NAME as JOURNAL
from preprocessing.journal import Journal
from preprocessing.tasks import Target, Task, make_files
from preprocessing.workers import in_parallel

_SPARE = 64 * 2**20  # bytes for labels, lists and the journal, on top of the images


@dataclass(frozen=True)
class Job:
    """A dataset folder to make.

    `settings` go into the manifest, and must be the same when an interrupted job goes on.
    """

    folder: Path
    target: Target  # its folder is `unfinished`
    tasks: list[Task]
    classes: list[str]
    class_names: list[str]
    settings: dict[str, Any]


def unfinished(folder: Path) -> Path:
    """Where a dataset folder is made before it gets its name."""
    return folder.with_name(f".{folder.name}.unfinished")


def build(job: Job, n_workers: int, max_errors: int) -> Outcome:
    """Makes the folder, or the rest of it. Raises UserError; what is done by then stays for the next run."""
    if job.folder.exists():
        raise UserError(f"{job.folder}: is there already; remove it, or name another target")
    target = job.target
    settings = {**job.settings, "size": target.size, "batch": target.batch}
    settings |= {"layout": target.layout, "split": target.parts}
    with _alone_in(target.folder):
        journal = Journal(target.folder, settings, job.tasks, target.size)
        journal.load()
        _check_errors(journal, max_errors)
        remaining = _remaining(job, journal)
        _check_space(job, remaining)
        _prepare(target)
        try:
            _do(job, journal, remaining, n_workers, max_errors)
        except BaseException:
            with suppress(UserError):  # the news is what stopped it
                journal.write()
            raise
        journal.write()
        outcome = write_rest(target, job.tasks, journal, (job.classes, job.class_names), settings)
        journal.remove()
        target.folder.rename(job.folder)
    return outcome


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if need be. Raises UserError when another process does.

    A process that is killed loses its hold. A folder that stays empty is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another process is at work in it; wait for it, or stop it") from error
        yield
    finally:
        os.close(descriptor)
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def _prepare(target: Target) -> None:
    """Makes the folders, and removes the temporary files of workers that were killed."""
    for name in (target.split_folder("train"), target.split_folder("val"), "labels", "misc"):
        (target.folder / name).mkdir(exist_ok=True)
    for path in [*target.folder.glob("*/.*"), *target.folder.glob(f".{JOURNAL}.*")]:
        path.unlink()


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
    free = shutil.disk_usage(folder).free
    print(f"the images take {total / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free in {folder}", flush=True)
    if needed > free:
        raise UserError(f"{folder}: has {free / 1e9:,.2f} GB free, {needed / 1e9:,.2f} GB are needed")
