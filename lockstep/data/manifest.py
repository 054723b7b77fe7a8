"""manifest.json: what a dataset folder holds, file by file, for the trainer's check before step 1.

It is small whatever the number of images (1.3 MB for ImageNet), because every process of a run reads it:
names of source pictures are in text files beside it (misc/train_order.txt, "name label" a line), which only
tools read. Version 1 had names and labels in it; it is still read.
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

from lockstep.data.hkl import HklArray, Layout
from lockstep.errors import UserError
from lockstep.files import checksum

MANIFEST_VERSION = 2
NAME = "manifest.json"
Resize = Literal["squash", "crop", "pad"]  # how pictures became square: see preprocessing/pictures.py
RESIZES: tuple[Resize, ...] = get_args(Resize)


@dataclass(frozen=True)
class FileEntry:
    """One .hkl file. `file` is relative to the folder; digests are SHA-256, of the file and of its labels."""

    file: str
    n_images: int
    n_bytes: int | None  # None in version 1
    sha256: str | None
    labels_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What the trainer needs to know.

    class_names: words for people, one for each of `classes`. others: SHA-256 of labels, lists, mean image.
    """

    path: Path
    classes: tuple[str, ...]
    class_names: tuple[str, ...]
    layout: Layout
    train: tuple[FileEntry, ...]
    val: tuple[FileEntry, ...]
    others: dict[str, str]
    resize: Resize

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every file of the folder, by its name in it; of version 1 what there is."""
        return {entry.file: entry.sha256 for entry in self.train + self.val if entry.sha256} | self.others

    def folder_of(self, split: str) -> Path:
        """Where the files of 'train' or 'val' lie."""
        entries: tuple[FileEntry, ...] = getattr(self, split)
        return self.path.parent / Path(entries[0].file).parent


def digest_of_labels(labels: Any) -> str:
    """SHA-256 of whole numbers as little-endian int64."""
    return hashlib.sha256(np.asarray(labels).astype("<i8").tobytes()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a dataset folder, None where there is none. Raises UserError if it can't be used."""
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
    """Raises one of several errors where something is missing or of the wrong kind."""
    version = content["version"]
    if version not in (1, MANIFEST_VERSION):
        raise ValueError(f"version {version}")
    classes = tuple(_text(name) for name in _items(content["classes"]))
    names = tuple(_text(name) for name in _items(content.get("class_names", list(classes))))
    layout = content.get("layout", "b01c")
    if layout not in ("b01c", "c01b") or len(names) != len(classes):
        raise ValueError("layout or class_names")
    read = _entry_of_version_1 if version == 1 else _entry
    halves = {split: tuple(read(entry) for entry in _items(content[split])) for split in ("train", "val")}
    others = {_text(name): _text(value) for name, value in content.get("others", {}).items()}
    resize = content.get("resize", "squash")
    if resize not in RESIZES:
        raise UserError(f"{path}: resize must be one of {', '.join(RESIZES)}, not {resize!r}")
    for name in (*(entry.file for half in halves.values() for entry in half), *others):
        if not _is_inside(name):
            raise UserError(f"{path}: names {name!r}, which is no file in its folder")
    return Manifest(path, classes, names, layout, halves["train"], halves["val"], others, resize)


def _is_inside(name: str) -> bool:
    """Whether a name can't lead out of the folder that it is relative to."""
    place = PurePosixPath(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts and name.isprintable()


def _entry(entry: dict[str, Any]) -> FileEntry:
    numbers = (entry["n_images"], entry["n_bytes"])
    if not all(type(number) is int for number in numbers):
        raise TypeError("n_images and n_bytes are whole numbers")
    texts = [_text(entry[key]) for key in ("file", "sha256", "labels_sha256")]
    return FileEntry(texts[0], *numbers, *texts[1:])


def _entry_of_version_1(entry: dict[str, Any]) -> FileEntry:
    labels = np.array(entry["labels"], np.int64)
    return FileEntry(_text(entry["file"]), len(labels), None, entry.get("sha256"), digest_of_labels(labels))


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError("not a list with something in it")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def check_files(entries: tuple[FileEntry, ...], files: tuple[HklArray, ...], labels: np.ndarray) -> None:
    """Names, numbers of images, sizes and labels. Raises UserError naming the first file that differs."""
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
    """Which of the files (name in `folder`: SHA-256) are missing or have another content, in order.

    Reads on as many threads as there are cores. `on_done` is called with each name, from one thread.
    """

    def is_different(name: str) -> bool:
        try:
            return checksum(folder / name) != checksums[name]
        except OSError:
            return True

    found = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, different in zip(checksums, pool.map(is_different, checksums), strict=True):
            if different:
                found.append(name)
            on_done(name)
    return found


def check_sums(manifest: Manifest) -> None:
    """Reads every file. Raises UserError naming the first one whose content is not what was written."""
    wrong = differing(manifest.path.parent, manifest.checksums())
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{manifest.path.parent / wrong[0]}: its checksum is not the manifest's{more}; "
            "copy or make it again"
        )
