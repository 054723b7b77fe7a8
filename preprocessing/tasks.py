"""The work of one worker: a batch of images, from its sources to its .hkl file (or two, or four)."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lockstep.data import c01b, hkl
from lockstep.data import old_folders as theano_alexnet
from lockstep.data.hkl import HklArray, Layout
from lockstep.errors import UserError
from lockstep.files import checksum
from preprocessing.listing import Picture
from preprocessing.pictures import BadPicture, Geometry, to_image
from preprocessing.sums import PixelSums

OnError = Literal["stop", "skip", "replace"]


class Bad(NamedTuple):
    """A picture that can't be used: its row in the batch, where it lies, why, and what came instead."""

    row: int
    place: str
    reason: str
    instead: str | None


class Source(Protocol):
    """Where a batch's images come from."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> tuple[int, ...]: ...
    def load(self) -> tuple[np.ndarray, list[Bad]]:
        """uint8 (batch, row, column, 3), without those that are bad and not replaced; and the bad ones."""
        ...


@dataclass(frozen=True)
class PictureBatch:
    """Pictures to decode. `spares`: for on_error replace, the one to take instead of each."""

    pictures: tuple[Picture, ...]
    spares: tuple[Picture, ...]
    geometry: Geometry
    on_error: OnError

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(picture.name for picture in self.pictures)

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(picture.label for picture in self.pictures)

    def load(self) -> tuple[np.ndarray, list[Bad]]:
        size = self.geometry.size
        images = np.empty((len(self.pictures), size, size, 3), np.uint8)
        bad: list[Bad] = []
        n_images = 0
        for row, picture in enumerate(self.pictures):
            try:
                images[n_images] = read_picture(picture, self.geometry)
            except BadPicture as error:
                if self.on_error == "stop":
                    raise UserError(
                        f"{picture.place}: can't be used: {error} (--on-error skip or replace goes on)"
                    ) from error
                bad.append(Bad(row, picture.place, str(error), None))
                if self.on_error == "skip":
                    continue
                images[n_images] = self._replacement(row)
                bad[-1] = bad[-1]._replace(instead=self.spares[row].name)
            n_images += 1
        return images[:n_images], bad

    def _replacement(self, row: int) -> np.ndarray:
        try:
            return read_picture(self.spares[row], self.geometry)
        except BadPicture as error:
            raise UserError(
                f"{self.pictures[row].place}: can't be used, nor can {self.spares[row].place}, the next of "
                f"its class: {error} (--on-error skip goes on without it)"
            ) from error


@dataclass(frozen=True)
class StoredBatch:
    """Images that are in .hkl files already: (file, first row, number of rows), one after the other."""

    runs: tuple[tuple[HklArray, int, int], ...]
    names: tuple[str, ...]
    labels: tuple[int, ...]

    def load(self) -> tuple[np.ndarray, list[Bad]]:
        images = np.empty((len(self.labels), *self.runs[0][0].row_shape), np.uint8)
        done = 0
        for file, first, count in self.runs:
            hkl.read_rows(file, first, images[done : done + count])
            done += count
        return images, []


@dataclass(frozen=True)
class Task:
    """Batch number `number` of 'train' or 'val'."""

    split: str
    number: int
    source: Source

    @property
    def key(self) -> str:
        return f"{self.split}/{self.number}"


@dataclass(frozen=True)
class Target:
    """How files are written. `parts`: c01b only, into how many files a batch is divided (1, 2 or 4)."""

    folder: Path
    size: int
    batch: int
    layout: Layout
    parts: int

    def split_folder(self, split: str) -> str:
        if self.layout == "b01c":
            return f"{split}_hkl"
        return f"{split}_hkl_b{self.batch}_b_{self.batch // self.parts}"  # theano_alexnet's name

    def names(self, task: Task) -> list[str]:
        """The files of a task, relative to the folder."""
        stem = f"{self.split_folder(task.split)}/{task.number:04d}"
        return [f"{stem}{suffix}.hkl" for suffix in theano_alexnet.SUFFIXES[self.parts]]


@dataclass(frozen=True)
class Record:
    """What has become of a task; kept in the journal as JSON."""

    files: list[dict[str, Any]] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Record":
        return cls(value["files"], [Bad(*bad) for bad in value["bad"]])


def read_picture(picture: Picture, geometry: Geometry) -> np.ndarray:
    """uint8 (size, size, 3). Raises BadPicture."""
    try:
        return to_image(picture.read(), geometry)
    except OSError as error:
        raise BadPicture(error.strerror or str(error)) from error


def make_files(task: Task, target: Target) -> tuple[Record, PixelSums | None]:
    """Makes the files of a batch; each appears whole or not at all. Sums are of training images only."""
    images, bad = task.source.load()
    record = Record([], bad)
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
