"""The images of a source, with their paths and classes."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.config.tasks import Task
from lockstep.errors import UserError
from lockstep.text import as_name, one_line

LEFT_OUT_LIST = "misc/left_out.txt"
_SYSTEM_FOLDERS = {"$RECYCLE.BIN", "@eaDir", "System Volume Information", "__MACOSX", "lost+found"}
_N_NAMED = 3  # files per reason in a message


Label = int | tuple[int, ...]  # a class; with `task: multilabel` all classes of an image, in order


class SourceImage(NamedTuple):
    """An image of the source: a file, or a range of bytes in a tar. Small: ImageNet has 1.28 million."""

    name: str  # <class>/<file>, or <file> without class folders, the same for tars and folders
    label: Label
    path: str  # of the file, or of its tar
    offset: int = 0
    n_bytes: int = -1  # -1: the whole file

    @property
    def place(self) -> str:
        """The image's path for messages."""
        return self.path if self.n_bytes < 0 else f"{self.path}: {self.name}"

    def read(self) -> bytes:
        """Return the image's bytes. Raise OSError if they can't be read completely."""
        with open(self.path, "rb") as file:
            if self.n_bytes < 0:
                return file.read()
            content = os.pread(file.fileno(), self.n_bytes, self.offset)
        if len(content) != self.n_bytes:
            raise OSError(f"{self.path}: ends in the middle of {self.name}")
        return content


class LeftOut(NamedTuple):
    """A file or folder of the source that is not part of the dataset, and the reason."""

    place: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """The images and classes of a dataset.

    Attributes:
        classes: The classes; a label is an index into them. Line breaks, and bytes that are not UTF-8, become
            escapes.
        class_names: A readable name for each class, likewise.
        left_out: Files and folders of the source that are not part of the dataset.
        task: Whether labels are a class of each image or any number of them.
    """

    classes: list[str]
    class_names: list[str]
    train: list[SourceImage]
    val: list[SourceImage]
    left_out: tuple[LeftOut, ...] = ()
    task: Task = "classify"

    def __post_init__(self) -> None:
        for key in ("classes", "class_names"):
            object.__setattr__(self, key, [as_name(name) for name in getattr(self, key)])


def classes_of(label: Label) -> tuple[int, ...]:
    """Return all classes of an image."""
    return (label,) if isinstance(label, int) else label


def why_hidden(name: str) -> str | None:
    """Return why a file or folder of this name is left out, or None."""
    if name.startswith(".") and name not in (".", ".."):  # these two name other folders
        return "hidden"
    return "a folder of the operating system" if name in _SYSTEM_FOLDERS else None


def summary_of(left_out: Iterable[LeftOut]) -> list[str]:
    """Return a line per reason, with the number of files and the first of them."""
    places: dict[str, list[str]] = {}
    for each in left_out:
        places.setdefault(each.reason, []).append(one_line(each.place))
    return [
        f"left out {len(names):,}, {reason}: {', '.join(names[:_N_NAMED])}"
        + (" ..." if len(names) > _N_NAMED else "")
        for reason, names in places.items()
    ]


def require_images(images: list[SourceImage], where: object) -> list[SourceImage]:
    """Return the images. Raise UserError if there are none."""
    if not images:
        raise UserError(f"{where}: holds no images that Pillow reads")
    return images
