"""Images in folders: one folder per class, or all in one folder."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError
from preprocessing.formats import why_no_image
from preprocessing.listing import LeftOut, SourceImage, require_images, why_hidden


def find_classes(folder: Path) -> list[str]:
    """Return the sorted names of the class folders. Raise UserError if there are none."""
    classes = class_names(folder)
    if not classes:
        raise UserError(f"{folder}: holds no class folders")
    return classes


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the class folders, if there are any."""
    return sorted(entry.name for entry in _scan(folder) if _is_class(entry))


def list_class_folders(folder: Path, classes: list[str], left_out: list[LeftOut]) -> list[SourceImage]:
    """Return every image in <folder>/<class>/ and below, by class, then by name.

    Args:
        folder: The folder of the class folders.
        classes: The names of all classes.
        left_out: Gets the files that are not images of a class.

    Raises:
        UserError: A folder is not one of `classes`, or there are no images.
    """
    unknown = sorted(set(find_classes(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: the training images have no such class")
    images = [
        SourceImage(f"{name}/{file}", label, f"{folder}/{name}/{file}")
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in find_images(folder / name, left_out)
    ]
    for entry in sorted(_scan(folder), key=lambda entry: entry.name):
        if not _is_class(entry):
            reason = _why_left_out(entry) or "an image outside of the class folders"
            left_out.append(LeftOut(entry.path, reason))
    return require_images(images, folder)


def find_images(folder: Path, left_out: list[LeftOut]) -> list[str]:
    """Return the sorted names of the images in a folder and its sub-folders, relative to it."""
    return sorted(_walk(folder, "", left_out, tuple(folder.resolve().parents)))


def _walk(folder: Path, prefix: str, left_out: list[LeftOut], above: tuple[Path, ...]) -> Iterator[str]:
    """Yield the names of the images below a folder. above: its parent folders, to detect cycles."""
    above = (*above, folder.resolve())
    for entry in sorted(_scan(folder), key=lambda entry: entry.name):
        reason = _why_left_out(entry)
        if reason is None and entry.is_dir() and Path(entry.path).resolve() in above:
            reason = "a link to a folder that it lies in"
        if reason is not None:
            left_out.append(LeftOut(entry.path, reason))
        elif entry.is_dir():
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", left_out, above)
        else:
            yield prefix + entry.name


def _why_left_out(entry: "os.DirEntry[str]") -> str | None:
    """Return the reason to leave out an entry, or None for an image or a folder."""
    try:
        hidden = why_hidden(entry.name)
        if hidden or entry.is_dir():
            return hidden or _written_by_lockstep(entry.path)
        _check_regular(entry)
    except OSError as error:  # a pipe, or a link to itself
        return f"can't be read: {error.strerror}"
    return why_no_image(entry.name, lambda: entry.path)


def _written_by_lockstep(folder: str) -> str | None:
    """Return what a folder is whose images are contact sheets or a report's charts, or None."""
    if os.path.exists(f"{folder}/manifest.json") and os.path.isdir(f"{folder}/train_hkl"):
        return "a dataset folder"
    is_of_runs = os.path.basename(folder) == "runs" and any(Path(folder).glob("*/log.jsonl"))
    return "a folder of runs" if is_of_runs else None


def _check_regular(entry: "os.DirEntry[str]") -> None:
    """Raise OSError for what is not a regular file, such as a pipe, whose reader would wait for ever."""
    if os.path.exists(entry.path) and not entry.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


def _is_class(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir() and not (why_hidden(entry.name) or _written_by_lockstep(entry.path))
    except OSError:  # a link to itself; _why_left_out names it
        return False


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: there is no such folder") from error
    except OSError as error:
        raise UserError(f"{folder}: can't be listed: {error.strerror}") from error
