"""manifest.json: the contents of a dataset folder, file by file, which are checked before step 1.

Every process of a run reads it, so it is small (1.3 MB for ImageNet). The names of source images are in text
files beside it, such as misc/train_order.txt, which only tools read. Version 1 had names and labels in the
manifest; it is still read.
"""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np

from lockstep.config.tasks import MONITORED, Task
from lockstep.data.hkl import HklArray, Layout
from lockstep.errors import UserError
from lockstep.files import checksum
from lockstep.typed import convert

MANIFEST_VERSION = 2
NAME = "manifest.json"
Resize = Literal["squash", "crop", "pad"]  # how images became square: see preprocessing/images.py
RESIZES: tuple[Resize, ...] = get_args(Resize)
Orientation = Literal["apply", "ignore"]  # "apply": images were rotated as their EXIF data say
ORIENTATIONS: tuple[Orientation, ...] = get_args(Orientation)


@dataclass(frozen=True)
class FileEntry:
    """One .hkl file, relative to the folder, with the SHA-256 digests of the file and of its labels."""

    file: str
    n_images: int
    n_bytes: int | None  # None in version 1
    sha256: str | None
    labels_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    Attributes:
        class_names: A readable name for each of `classes`.
        others: SHA-256 of the labels, the lists and the mean image, by file name.
        task: 'multilabel' if an image may have several classes, or none.
    """

    path: Path
    classes: tuple[str, ...]
    class_names: tuple[str, ...]
    layout: Layout
    train: tuple[FileEntry, ...]
    val: tuple[FileEntry, ...]
    others: dict[str, str]
    resize: Resize
    orientation: Orientation
    task: Task = "classify"

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of every file by its name. Version 1 has only some of them."""
        return {entry.file: entry.sha256 for entry in self.train + self.val if entry.sha256} | self.others

    def digest(self) -> str:
        """Return a SHA-256 of the classes and of every file's name, content and labels."""
        entries = [(each.file, each.sha256, each.labels_sha256) for each in self.train + self.val]
        content: list[Any] = [self.classes, self.layout, entries, sorted(self.others.items())]
        if self.task != "classify":
            content.append(self.task)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def folder_of(self, split: str) -> Path:
        """Return the folder with the files of 'train' or 'val'."""
        entries: tuple[FileEntry, ...] = getattr(self, split)
        return self.path.parent / Path(entries[0].file).parent


def digest_of_labels(labels: Any) -> str:
    """Return the SHA-256 of integers as little-endian int64."""
    return hashlib.sha256(np.asarray(labels).astype("<i8").tobytes()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a dataset folder, or None without one. Raise UserError if it can't be used."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    try:
        return _parse(path, content)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: is not a manifest of version {MANIFEST_VERSION} (or 1); make the dataset folder again"
        ) from error


def _parse(path: Path, content: dict[str, Any]) -> Manifest:
    """Parse the content. Raise one of several types of errors if something is missing or wrong."""
    version = content["version"]
    if version not in (1, MANIFEST_VERSION):
        raise ValueError(f"version {version}")
    classes = convert(_items(content["classes"]), tuple[str, ...])
    names = convert(_items(content.get("class_names", list(classes))), tuple[str, ...])
    layout = content.get("layout", "b01c")
    if layout not in ("b01c", "c01b") or len(names) != len(classes):
        raise ValueError("layout or class_names")
    read = _entry_of_version_1 if version == 1 else _entry
    halves = {split: tuple(read(entry) for entry in _items(content[split])) for split in ("train", "val")}
    others = {name: convert(value, str) for name, value in content.get("others", {}).items()}
    resize = content.get("resize", "squash")
    if resize not in RESIZES:
        raise UserError(f"{path}: resize must be one of {', '.join(RESIZES)}, not {resize!r}")
    orientation = content.get("orientation", "ignore")
    if orientation not in ORIENTATIONS:
        raise UserError(f"{path}: orientation must be one of {', '.join(ORIENTATIONS)}, not {orientation!r}")
    task = content.get("task", "classify")
    if task not in MONITORED:
        raise UserError(f"{path}: task must be one of {', '.join(MONITORED)}, not {task!r}")
    for name in (*(entry.file for half in halves.values() for entry in half), *others):
        if not _is_inside(name):
            raise UserError(f"{path}: names {name!r}, which is no file in its folder")
    train, val = halves["train"], halves["val"]
    return Manifest(path, classes, names, layout, train, val, others, resize, orientation, task)


def _is_inside(name: str) -> bool:
    """Return whether a relative name stays inside its folder."""
    place = PurePosixPath(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts and name.isprintable()


def _entry(entry: dict[str, Any]) -> FileEntry:
    n_images, n_bytes = (convert(entry[key], int) for key in ("n_images", "n_bytes"))
    file, sha256, labels_sha256 = (convert(entry[key], str) for key in ("file", "sha256", "labels_sha256"))
    return FileEntry(file, n_images, n_bytes, sha256, labels_sha256)


def _entry_of_version_1(entry: dict[str, Any]) -> FileEntry:
    labels = np.array(entry["labels"], np.int64)
    file = convert(entry["file"], str)
    return FileEntry(file, len(labels), None, entry.get("sha256"), digest_of_labels(labels))


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError("not a list, or an empty one")
    return value


def check_files(entries: tuple[FileEntry, ...], files: tuple[HklArray, ...], labels: np.ndarray) -> None:
    """Compare names, numbers of images, sizes and labels. Raise UserError for the first file that differs."""
    if len(entries) != len(files):
        where = Path(files[0].path).parent
        raise UserError(f"{where}: holds {len(files)} files, the manifest has {len(entries)}")
    first = 0
    for entry, file in zip(entries, files, strict=True):
        n_images, n_bytes = file.shape[0], file.stamp[1]
        if Path(entry.file).name != Path(file.path).name or entry.n_images != n_images:
            raise UserError(
                f"{file.path}: holds {n_images} images, the manifest has {entry.n_images} in {entry.file}"
            )
        if entry.n_bytes not in (None, n_bytes):
            raise UserError(f"{file.path}: has {n_bytes} bytes, the manifest says {entry.n_bytes}")
        if digest_of_labels(labels[first : first + n_images]) != entry.labels_sha256:
            raise UserError(f"{file.path}: its labels are not those of the manifest")
        first += n_images


def differing(
    folder: Path, checksums: dict[str, str], on_done: Callable[[str], object] = lambda name: None
) -> list[str]:
    """Return the names of files that are missing or differ from their checksum, in order.

    Args:
        folder: The folder of the files.
        checksums: The SHA-256 of each file by its name.
        on_done: Called with each name when it is checked, from one thread.
    """

    def is_different(name: str) -> bool:
        try:
            return checksum(folder / name) != checksums[name]
        except OSError:
            return True

    names = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, different in zip(checksums, pool.map(is_different, checksums), strict=True):
            if different:
                names.append(name)
            on_done(name)
    return names


def check_sums(manifest: Manifest) -> None:
    """Read every file. Raise UserError for the first one whose content differs from its checksum."""
    wrong = differing(manifest.path.parent, manifest.checksums())
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{manifest.path.parent / wrong[0]}: its checksum is not the manifest's{more}; "
            "copy or make it again"
        )
