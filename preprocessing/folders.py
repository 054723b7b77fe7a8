"""Pictures in folders: one folder for each class, or all in one folder."""

import os
from pathlib import Path

from lockstep.errors import UserError
from preprocessing.listing import Picture, is_picture, require_pictures


def find_classes(folder: Path) -> list[str]:
    """The sorted names of the class folders. Raises UserError where there are none."""
    classes = sorted(entry.name for entry in _scan(folder) if entry.is_dir())
    if not classes:
        raise UserError(f"{folder}: holds no class folders")
    return classes


def has_class_folders(folder: Path) -> bool:
    return any(entry.is_dir() for entry in _scan(folder))


def list_class_folders(folder: Path, classes: list[str]) -> list[Picture]:
    """Every picture in <folder>/<class>/, by class, then by name. Raises UserError for an unknown class."""
    unknown = sorted(set(find_classes(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: the training pictures have no such class")
    pictures = [
        Picture(f"{name}/{file}", label, f"{folder}/{name}/{file}")
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in find_pictures(folder / name)
    ]
    return require_pictures(pictures, folder)


def find_pictures(folder: Path) -> list[str]:
    """The sorted names of the pictures in one folder."""
    return sorted(entry.name for entry in _scan(folder) if is_picture(entry.name))


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: there is no such folder") from error
    except OSError as error:
        raise UserError(f"{folder}: can't be listed: {error.strerror}") from error
