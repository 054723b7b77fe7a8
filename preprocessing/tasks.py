"""The work of a worker: a batch of images, from its sources to its .hkl file or files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lockstep.data import c01b, hkl
from lockstep.data import old_folders as theano_alexnet
from lockstep.data.hkl import HklArray, Layout
from lockstep.errors import UserError
from lockstep.files import checksum
from preprocessing.images import BadImage, Geometry, Shape, UnreadImage, to_sized_image
from preprocessing.listing import Label, SourceImage
from preprocessing.sums import PixelSums

OnError = Literal["stop", "skip", "replace"]


class Bad(NamedTuple):
    """An unusable image: its row in the batch, its path, the reason, and its replacement.

    `is_unread` says that its file could not be read, which may pass.
    """

    row: int
    place: str
    reason: str
    instead: str | None
    is_unread: bool = False


class Source(Protocol):
    """The origin of a batch's images."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> tuple[Label, ...]: ...
    def load(self) -> "Loaded":
        """Return the images without unusable ones, and a list of those."""
        ...


class Loaded(NamedTuple):
    """The images of a batch, uint8 (batch, row, column, 3), the unusable ones, and each image's own shape.

    `shapes` is empty where the shapes of the source files are not known.
    """

    images: np.ndarray
    bad: list[Bad]
    shapes: list[Shape]


class StoredImage(NamedTuple):
    """An image that an earlier dataset holds: its file, its row there, and the source file's own shape."""

    file: HklArray
    row: int
    shape: Shape


@dataclass(frozen=True)
class ImageBatch:
    """A batch of images to decode.

    Attributes:
        spares: The replacement of each image, for on_error: replace; else empty.
        stored: For each image None, or where an earlier dataset holds it; empty without such a dataset.
    """

    sources: tuple[SourceImage, ...]
    spares: tuple[SourceImage, ...]
    geometry: Geometry
    on_error: OnError
    stored: tuple[StoredImage | None, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(source.label for source in self.sources)

    def load(self) -> Loaded:
        """Return the decoded images. Raise UserError at a bad one, unless `on_error` allows it."""
        size = self.geometry.size
        images = np.empty((len(self.sources), size, size, 3), np.uint8)
        bad: list[Bad] = []
        shapes: list[Shape] = []
        for row, source in enumerate(self.sources):
            place = images[len(shapes) : len(shapes) + 1]
            try:
                shapes.append(self._read(row, place))
            except BadImage as error:
                if self.on_error == "stop":
                    raise UserError(
                        f"{source.place}: can't be used: {error} (--on-error skip or replace continues; "
                        "with --layout c01b, replace only)"
                    ) from error
                is_unread = isinstance(error, UnreadImage)
                bad.append(Bad(row, source.place, str(error), None, is_unread))
                if self.on_error == "skip":
                    continue
                place[0], shape = self._replacement(row)
                shapes.append(shape)
                bad[-1] = bad[-1]._replace(instead=self.spares[row].name)
        return Loaded(images[: len(shapes)], bad, shapes)

    def _read(self, row: int, out: np.ndarray) -> Shape:
        """Read an image into `out`, uint8 (1, size, size, 3). Return the shape that its file has."""
        stored = self.stored[row] if self.stored else None
        if stored:
            hkl.read_rows(stored.file, stored.row, out)
            return stored.shape
        out[0], shape = read_source_image(self.sources[row], self.geometry)
        return shape

    def _replacement(self, row: int) -> tuple[np.ndarray, Shape]:
        try:
            return read_source_image(self.spares[row], self.geometry)
        except BadImage as error:
            raise UserError(
                f"{self.sources[row].place}: can't be used, nor can {self.spares[row].place}, the next of "
                f"its class: {error} (--on-error skip continues without it)"
            ) from error


@dataclass(frozen=True)
class StoredBatch:
    """A batch of images from .hkl files: a sequence of (file, first row, number of rows)."""

    runs: tuple[tuple[HklArray, int, int], ...]
    names: tuple[str, ...]
    labels: tuple[Label, ...]

    def load(self) -> Loaded:
        """Return the stored images."""
        images = np.empty((len(self.labels), *self.runs[0][0].row_shape), np.uint8)
        done = 0
        for file, first, count in self.runs:
            hkl.read_rows(file, first, images[done : done + count])
            done += count
        return Loaded(images, [], [])


@dataclass(frozen=True)
class Task:
    """The making of batch number `number` of 'train' or 'val'."""

    split: str
    number: int
    source: Source

    @property
    def key(self) -> str:
        return f"{self.split}/{self.number}"


@dataclass(frozen=True)
class Target:
    """The folder and layout of the files.

    Attributes:
        parts: Files per batch (1, 2 or 4); more than 1 for c01b only.
        with_shapes: Whether records have the shape of every source file, which takes memory.
    """

    folder: Path
    size: int
    batch: int
    layout: Layout
    parts: int
    with_shapes: bool = False

    def split_folder(self, split: str) -> str:
        """Return the name of the folder of 'train' or 'val'."""
        if self.layout == "b01c":
            return f"{split}_hkl"
        return f"{split}_hkl_b{self.batch}_b_{self.batch // self.parts}"  # theano_alexnet's name

    def names(self, task: Task) -> list[str]:
        """Return the files of a task, relative to the folder."""
        stem = f"{self.split_folder(task.split)}/{task.number:04d}"
        return [f"{stem}{suffix}.hkl" for suffix in theano_alexnet.SUFFIXES[self.parts]]


@dataclass(frozen=True)
class Record:
    """The result of a task, stored in the journal as JSON."""

    files: list[dict[str, Any]]
    bad: list[Bad]
    shapes: list[Shape]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Record":
        """Return the record whose fields have these JSON values."""
        shapes = [(rows, columns) for rows, columns in value.get("shapes", [])]
        return cls(value["files"], [Bad(*bad) for bad in value["bad"]], shapes)


def read_source_image(source: SourceImage, geometry: Geometry) -> tuple[np.ndarray, Shape]:
    """Return a decoded image, uint8 (size, size, 3), and the shape that its file has.

    Raises:
        BadImage: The image can't be used.
    """
    try:
        return to_sized_image(source.read(), geometry, source.name)
    except OSError as error:
        raise UnreadImage(error.strerror or str(error)) from error


def make_files(task: Task, target: Target) -> tuple[Record, PixelSums | None]:
    """Make the files of a batch, each written atomically. Sums are of training images only."""
    images, bad, shapes = task.source.load()
    record = Record([], bad, shapes if target.with_shapes else [])
    if len(images):
        for name, part in zip(target.names(task), np.array_split(images, target.parts), strict=True):
            path = target.folder / name
            if target.layout == "b01c":
                hkl.write(path, part)
            else:
                hkl.write_hickle2(path, c01b.from_b01c(part))
            entry = {"file": name, "n_images": len(part), "n_bytes": path.stat().st_size}
            record.files.append({**entry, "sha256": checksum(path)})
    if task.split != "train":
        return record, None
    sums = PixelSums(target.size)
    sums.add(images)
    return record, sums
