"""What there is to make a dataset of: pictures, where they lie, and the classes that they belong to."""

import os
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import UserError

ENDINGS = {".jpeg", ".jpg", ".png", ".webp"}


class Picture(NamedTuple):
    """One picture: a file, or a stretch of bytes in a tar. Small, for there are 1.28 million in ImageNet."""

    name: str  # <class>/<file>, or <file> where pictures lie flat: the same whatever the kind of source
    label: int
    path: str  # of the file, or of the tar that holds it
    offset: int = 0
    n_bytes: int = -1  # -1: the whole file

    @property
    def place(self) -> str:
        """For messages: where a person finds it."""
        return self.path if self.n_bytes < 0 else f"{self.path}: {self.name}"

    def read(self) -> bytes:
        """Its bytes. Raises OSError where they can't be read or are not all there."""
        with open(self.path, "rb") as file:
            if self.n_bytes < 0:
                return file.read()
            content = os.pread(file.fileno(), self.n_bytes, self.offset)
        if len(content) != self.n_bytes:
            raise OSError(f"{self.path}: ends in the middle of {self.name}")
        return content


@dataclass(frozen=True)
class Listing:
    """Labels are places in `classes`; `class_names` has words for people, one for each class."""

    classes: list[str]
    class_names: list[str]
    train: list[Picture]
    val: list[Picture]


def is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


def require_pictures(pictures: list[Picture], where: object) -> list[Picture]:
    """Returns them. Raises UserError where there are none."""
    if not pictures:
        raise UserError(f"{where}: holds no pictures ({', '.join(sorted(ENDINGS))})")
    return pictures
