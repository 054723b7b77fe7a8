"""Converted sets of a user's own images: where they are kept, and whether they are current.

A set is a dataset folder with one more file, source.json: the path, label, size and time of each image that
it was made from. It is current while the images still have them. A set that is not current gives its rows to
the next one, so only images that are new or changed are decoded again.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.data import hkl
from lockstep.data.manifest import differing, read_manifest
from lockstep.errors import UserError
from lockstep.files import write_text
from preprocessing.images import Geometry, Shape
from preprocessing.listing import Listing, SourceImage, classes_of
from preprocessing.tasks import Record, StoredImage, Task

NAME = "source.json"
_VERSION = 1
_UNREAD = -1, 0  # size and time of a file that can't be read


class Stamp(NamedTuple):
    """The identity of an image's content and place: its half, class, and its file's size and time."""

    split: str
    class_name: str
    n_bytes: int
    time_ns: int


class Entry(NamedTuple):
    """An image of a set: its path, its stamp and its file's rows and columns; (0, 0) if it was unusable."""

    path: str
    stamp: Stamp
    shape: Shape


@dataclass(frozen=True)
class SourceRecord:
    """The content of source.json.

    Attributes:
        geometry: How the images became square.
        seconds: The time of the conversion.
        train: The training images in the order of the rows; `val`: the validation images.
        bad: The images that could not be used.
    """

    geometry: Geometry
    seconds: float
    train: list[Entry]
    val: list[Entry]
    bad: list[Entry]

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamps of all images by path, unusable ones included."""
        return {entry.path: entry.stamp for entry in (*self.train, *self.val, *self.bad)}

    def write(self, folder: Path) -> None:
        """Write source.json. Raise UserError if that fails."""
        content = {**vars(self), "version": _VERSION, "geometry": asdict(self.geometry)}
        write_text(folder / NAME, json.dumps(content))


def read_record(folder: Path) -> SourceRecord | None:
    """Return the record of a set, or None without a usable one: the set is then made again."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            return None
        content["geometry"] = Geometry(**content["geometry"])
        content["seconds"] = float(content["seconds"])
        for key in ("train", "val", "bad"):
            content[key] = [
                Entry(path, Stamp(*stamp), (rows, columns)) for path, stamp, (rows, columns) in content[key]
            ]
        return SourceRecord(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def stamps_of(listing: Listing, source: Path) -> dict[str, Stamp]:
    """Return the stamp of every image by its relative path. A file that can't be read has the size -1."""
    known: dict[str, tuple[int, int]] = {}
    stamps = {}
    for split, images in (("train", listing.train), ("val", listing.val)):
        for image in images:
            if image.path not in known:
                known[image.path] = _size_and_time(image.path)
            names = ";".join(listing.classes[number] for number in classes_of(image.label))
            stamp = Stamp(split, names, *known[image.path])
            stamps[relative_path(image, source)] = stamp
    return stamps


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return _UNREAD
    return (status.st_size, status.st_mtime_ns) if os.access(path, os.R_OK) else _UNREAD


def fingerprint(stamps: dict[str, Stamp]) -> str:
    """Return a digest of all stamps."""
    digest = hashlib.sha256()
    for path, stamp in sorted(stamps.items()):
        digest.update(json.dumps([path, *stamp]).encode())
    return digest.hexdigest()


def relative_path(image: SourceImage, source: Path) -> str:
    """Return an image's path relative to the source: a set stays current if both are moved together."""
    return image.place.removeprefix(f"{source}/")


def make_record(
    geometry: Geometry,
    seconds: float,
    tasks: Iterable[Task],
    records: dict[str, Record],
    stamps: dict[str, Stamp],
    source: Path,
) -> SourceRecord:
    """Return the record of a set whose tasks are complete.

    Args:
        geometry: How the images became square.
        seconds: The time of the conversion.
        tasks: All tasks, whose sources are ImageBatch.
        records: The results of the tasks.
        stamps: The stamps by relative paths.
        source: The folder that the paths are relative to.
    """
    made = SourceRecord(geometry, seconds, [], [], [])
    for task in tasks:
        record = records[task.key]
        bad = {item.row: item for item in record.bad}
        shapes = iter(record.shapes)
        for row, image in enumerate(task.source.sources):  # type: ignore[attr-defined]
            path = relative_path(image, source)
            if row not in bad:
                getattr(made, task.split).append(Entry(path, stamps[path], next(shapes)))
                continue
            stamp = stamps[path]
            if bad[row].is_unread:  # the next run tries it again
                stamp = Stamp(stamp.split, stamp.class_name, *_UNREAD)
            made.bad.append(Entry(path, stamp, (0, 0)))
    return made


def stored_images(folder: Path, record: SourceRecord, stamps: dict[str, Stamp]) -> dict[str, StoredImage]:
    """Return where a set holds each image whose file is unchanged, without files of the set that are damaged.

    Args:
        folder: The set.
        record: Its record.
        stamps: The present stamps, by relative paths.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return {}
    damaged = set(differing(folder, manifest.checksums()))
    stored = {}
    for split in ("train", "val"):
        entries = iter(getattr(record, split))
        for file_entry in getattr(manifest, split):
            rows = [next(entries) for _ in range(file_entry.n_images)]
            if file_entry.file in damaged:
                continue
            file = hkl.inspect(folder / file_entry.file)
            for row, entry in enumerate(rows):
                now = stamps.get(entry.path)
                if now and now[2:] == entry.stamp[2:]:
                    stored[entry.path] = StoredImage(file, row, entry.shape)
    return stored


def candidates(source: Path, cache_folder: str | None) -> list[Path]:
    """Return the folders that may hold the sets of a source, the preferred one first."""
    digest = hashlib.sha256(os.fsencode(source)).hexdigest()[:8]
    own = f"{source.name}-{digest}"
    if cache_folder:
        return [Path(cache_folder).absolute() / own]
    places = [source.with_name(f"{source.name}.lockstep")]
    with suppress(RuntimeError):  # an account without a home, as in some containers
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        places.append(home / "lockstep" / own)
    return places


def first_writable(folders: list[Path]) -> tuple[Path, str]:
    """Create the first of the folders that can be written to.

    Returns:
        The folder, and a note if it is not the preferred one, else ''.

    Raises:
        UserError: None can be written to.
    """
    problems = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            problems.append(f"{folder}: can't be written: {error.strerror}")
        else:
            return folder, f"{problems[0]}; the converted set goes to {folder}" if problems else ""
    raise UserError(f"{'; '.join(problems)}. Set cache_folder to a folder that can be written.")
