"""ImageNet's tars, listed without unpacking: a tar is not compressed, so a member is a stretch of its bytes.

ILSVRC2012_img_train.tar holds a tar for each class, n01440764.tar say, which holds its pictures;
ILSVRC2012_img_val.tar holds pictures. Only headers are read, about one in 100 KB.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lockstep.errors import UserError
from preprocessing.listing import Picture, is_picture, require_pictures

_BLOCK = 512


class Member(NamedTuple):
    """A file in a tar; `offset` and `n_bytes` count in the outermost file."""

    name: str
    offset: int
    n_bytes: int


class _Window:
    """A stretch of an open file, as a file of its own: enough for tarfile to read headers."""

    def __init__(self, file: BinaryIO, start: int, n_bytes: int) -> None:
        self._file, self._start, self._n_bytes, self._place = file, start, n_bytes, 0

    def read(self, n_bytes: int) -> bytes:
        self._file.seek(self._start + self._place)
        content = self._file.read(max(0, min(n_bytes, self._n_bytes - self._place)))
        self._place += len(content)
        return content

    def seek(self, place: int) -> None:
        self._place = place

    def tell(self) -> int:
        return self._place


def list_train_tar(path: Path) -> tuple[list[str], list[Picture]]:
    """The sorted classes, and the pictures by class, then by name. Raises UserError naming a broken tar."""
    with _open(path) as file:
        inner = {
            Path(member.name).stem: member
            for member in _members(file, Member(str(path), 0, path.stat().st_size), path)
            if member.name.endswith(".tar")
        }
        if not inner:
            raise UserError(f"{path}: holds no tars of classes, as ILSVRC2012_img_train.tar does")
        classes = sorted(inner)
        pictures = []
        for label, name in enumerate(classes):
            members = _members(file, inner[name], path)
            pictures += _pictures(members, label, path, f"{name}/")
    return classes, require_pictures(pictures, path)


def list_class_tars(folder: Path, paths: list[Path]) -> tuple[list[str], list[Picture]]:
    """The same for a folder of the classes' tars, one level unpacked."""
    pictures = []
    classes = sorted(path.stem for path in paths)
    for label, name in enumerate(classes):
        path = folder / f"{name}.tar"
        with _open(path) as file:
            members = _members(file, Member(str(path), 0, path.stat().st_size), path)
            pictures += _pictures(members, label, path, f"{name}/")
    return classes, require_pictures(pictures, folder)


def list_flat_tar(path: Path) -> list[Picture]:
    """The pictures of ILSVRC2012_img_val.tar by name, without labels (-1)."""
    with _open(path) as file:
        members = _members(file, Member(str(path), 0, path.stat().st_size), path)
        return require_pictures(_pictures(members, -1, path, ""), path)


def _pictures(members: Iterator[Member], label: int, path: Path, prefix: str) -> list[Picture]:
    return [
        Picture(prefix + Path(member.name).name, label, str(path), member.offset, member.n_bytes)
        for member in sorted(members)
        if is_picture(member.name)
    ]


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: can't be opened: {error.strerror}") from error


def _members(file: BinaryIO, tar: Member, path: Path) -> Iterator[Member]:
    """The files in a tar that is a stretch of `file`. Raises UserError where it is broken or cut off.

    tarfile takes rubbish between members for the end; a whole tar ends with a block of zeros.
    """
    where = path if tar.offset == 0 else f"{path}: {tar.name}"
    window = _Window(file, tar.offset, tar.n_bytes)
    try:
        with tarfile.TarFile(fileobj=window, mode="r") as archive:  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
                if member.size < 0:  # tarfile would go back, and round and round
                    raise UserError(f"{where}: is damaged: {member.name} has a size below 0")
                if member.offset_data + member.size > tar.n_bytes:
                    raise UserError(f"{where}: is cut off in the middle of {member.name}")
                if member.isreg():
                    yield Member(member.name, tar.offset + member.offset_data, member.size)
            window.seek(archive.offset)
            if window.read(_BLOCK) != bytes(_BLOCK):
                raise UserError(f"{where}: is damaged or cut off at byte {archive.offset}")
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where}: is not a whole tar: {error}") from error
