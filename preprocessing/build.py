"""Making of a dataset folder from tasks: in parallel, beside its final path, and resumable."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.manifest import differing
from lockstep.errors import UserError
from lockstep.text import one_line
from preprocessing.bars import progress_bar, write_beside
from preprocessing.finish import Outcome, write_left_out, write_rest
from preprocessing.journal import NAME as JOURNAL
from preprocessing.journal import Journal
from preprocessing.listing import LeftOut
from preprocessing.tasks import Record, Target, Task, make_files
from preprocessing.workers import in_parallel

_SPARE = 64 * 2**20  # bytes for labels, lists and the journal, on top of the images


@dataclass(frozen=True)
class Job:
    """A dataset folder to make.

    `settings` are written to the manifest, and must be the same when an interrupted job resumes. So must
    `origin`, which is not written: other folders may have images of the same names.
    """

    folder: Path
    target: Target  # its folder is `unfinished`
    tasks: list[Task]
    classes: list[str]
    class_names: list[str]
    settings: dict[str, Any]
    left_out: tuple[LeftOut, ...] = ()  # files of the source that are not images
    replaces: bool = False  # an earlier dataset, also an unfinished one of other images, is replaced
    origin: str = ""  # folders of the images


def unfinished(folder: Path) -> Path:
    """Return the temporary path at which a dataset folder is made."""
    return folder.with_name(f".{folder.name}.unfinished")


Complete = Callable[[Path, dict[str, Record]], None]


def build(job: Job, n_workers: int, max_errors: int, complete: Complete | None = None) -> Outcome:
    """Make the folder, or the rest of it.

    Args:
        job: The dataset to make.
        n_workers: The number of processes.
        max_errors: The largest number of unusable images.
        complete: Called with the unfinished folder and the tasks' records, to write more files into it.

    Raises:
        UserError: A file can't be used or written. Finished batches stay for the next run.
    """
    _check_free(job)
    target = job.target
    settings = {**job.settings, "size": target.size, "batch": target.batch}
    settings |= {"layout": target.layout, "split": target.parts}
    with _own_folder(target.folder):
        journal = _open_journal(job, settings)
        _check_errors(journal, max_errors)
        remaining = _remaining(job, journal)
        _check_space(job, remaining)
        _prepare(target)
        try:
            _do(job, journal, remaining, n_workers, max_errors)
        except BaseException:
            with suppress(ValueError, MemoryError):  # report the error that stopped the work
                journal.write()
            raise
        journal.write()
        write_left_out(target.folder, job.left_out)
        outcome = write_rest(target, job.tasks, journal, (job.classes, job.class_names), settings)
        if complete:
            complete(target.folder, journal.records)
        _check_free(job)  # again: it would be removed
        journal.remove()
        replace_folder(target.folder, job.folder)
    return outcome


def _check_free(job: Job) -> None:
    """Raise UserError if the dataset's place is taken."""
    if job.folder.exists() and not job.replaces:
        raise UserError(f"{job.folder}: exists already. Remove it, or name another target.")


def _open_journal(job: Job, settings: dict[str, Any]) -> Journal:
    """Return the journal of an interrupted run, or a new one. Raise UserError if it is of another job."""
    identity = {**settings, "images in": job.origin}
    journal = Journal(job.target.folder, identity, job.tasks, job.target.size)
    try:
        journal.load()
    except UserError:
        if not job.replaces:
            raise
        for path in job.target.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return journal


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. An earlier `folder` is removed; `recover` undoes an interruption."""
    if folder.exists():
        folder.rename(_replaced(folder))
    new.rename(folder)
    shutil.rmtree(_replaced(folder), ignore_errors=True)


def recover(folder: Path) -> None:
    """Complete or undo a `replace_folder` that was interrupted, if its place can be searched."""
    if os.path.exists(folder):  # Path.exists() raises PermissionError there
        shutil.rmtree(_replaced(folder), ignore_errors=True)
    elif os.path.exists(_replaced(folder)):
        _replaced(folder).rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


@contextmanager
def locked(folder: Path, refusal: str) -> Iterator[None]:
    """Lock a folder. Raise UserError with `refusal` if another process has locked it.

    The kernel releases the lock of a killed process.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: {refusal}") from error
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Create a folder if needed, and lock it. One that stays empty is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, "another process is working in it. Wait for it, or stop it."):
            yield
    finally:
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def _prepare(target: Target) -> None:
    """Make the folders, and remove the temporary files of killed workers."""
    for name in (target.split_folder("train"), target.split_folder("val"), "labels", "misc"):
        (target.folder / name).mkdir(exist_ok=True)
    for path in [*target.folder.glob("*/.*"), *target.folder.glob(f".{JOURNAL}.*")]:
        if not path.is_dir():
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
                    write_beside(bar, f"bad image: {one_line(bad.place)}: {bad.reason}")
                _check_errors(journal, max_errors)


def _check_errors(journal: Journal, max_errors: int) -> None:
    if journal.n_bad() > max_errors:
        last = [bad for record in journal.records.values() for bad in record.bad][-1]
        raise UserError(
            f"{last.place}: {last.reason}; that makes {journal.n_bad()} bad images, more than "
            f"--max-errors {max_errors} (a higher one continues)"
        )


def _remaining(job: Job, journal: Journal) -> list[Task]:
    """Return the tasks whose files are missing or differ from their checksums."""
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
