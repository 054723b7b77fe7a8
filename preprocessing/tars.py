"""Listing of ImageNet's tars without unpacking: tars are not compressed, so a member is a range of bytes.

ILSVRC2012_img_train.tar holds a tar per class, such as n01440764.tar, with the images of the class.
ILSVRC2012_img_val.tar holds images. Only headers are read, about one per 100 KB.
"""

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lockstep.errors import UserError
from preprocessing.formats import why_no_image
from preprocessing.listing import LeftOut, SourceImage, require_images, why_hidden

_BLOCK = 512


class Member(NamedTuple):
    """A file in a tar. `offset` and `n_bytes` refer to the outermost file."""

    name: str
    offset: int
    n_bytes: int


class _Window:
    """A range of an open file as a file object, sufficient for tarfile to read headers."""

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


def list_train_tar(path: Path, left_out: list[LeftOut]) -> tuple[list[str], list[SourceImage]]:
    """Return the sorted classes, and the images by class, then by name. Raise UserError for a damaged tar.

    Args:
        path: The training tar.
        left_out: Gets the members that are not images.
    """
    with _open(path) as file:
        inner = {
            Path(member.name).stem: member
            for member in _members(file, Member(str(path), 0, path.stat().st_size), path)
            if member.name.endswith(".tar")
        }
        if not inner:
            raise UserError(f"{path}: holds no tars of classes, unlike ILSVRC2012_img_train.tar")
        classes = sorted(inner)
        images = []
        for label, name in enumerate(classes):
            members = _members(file, inner[name], path)
            images += _images_of(members, label, path, f"{name}/", left_out)
    return classes, require_images(images, path)


def list_class_tars(
    folder: Path, paths: list[Path], left_out: list[LeftOut]
) -> tuple[list[str], list[SourceImage]]:
    """Return the sorted classes, and the images by class, of a folder with a tar per class."""
    images = []
    classes = sorted(path.stem for path in paths)
    for label, name in enumerate(classes):
        path = folder / f"{name}.tar"
        with _open(path) as file:
            members = _members(file, Member(str(path), 0, path.stat().st_size), path)
            images += _images_of(members, label, path, f"{name}/", left_out)
    return classes, require_images(images, folder)


def list_flat_tar(path: Path, left_out: list[LeftOut]) -> list[SourceImage]:
    """Return the images of ILSVRC2012_img_val.tar by name, without labels (-1)."""
    with _open(path) as file:
        members = _members(file, Member(str(path), 0, path.stat().st_size), path)
        return require_images(_images_of(members, -1, path, "", left_out), path)


def _images_of(
    members: Iterator[Member], label: int, path: Path, prefix: str, left_out: list[LeftOut]
) -> list[SourceImage]:
    images = []
    for member in sorted(members):
        name = Path(member.name).name
        image = SourceImage(prefix + name, label, str(path), member.offset, member.n_bytes)
        hidden = next(filter(None, map(why_hidden, Path(member.name).parts)), None)
        reason = hidden or why_no_image(name, lambda: BytesIO(image.read()))  # noqa: B023 (called at once)
        if reason is None:
            images.append(image)
        else:
            left_out.append(LeftOut(image.place, reason))
    return images


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: can't be opened: {error.strerror}") from error


def _members(file: BinaryIO, tar: Member, path: Path) -> Iterator[Member]:
    """Yield the files in a tar that is a range of `file`. Raise UserError if it is damaged or truncated.

    tarfile mistakes damaged headers for the end. A complete tar ends with a block of zeros.
    """
    where = path if tar.offset == 0 else f"{path}: {tar.name}"
    window = _Window(file, tar.offset, tar.n_bytes)
    try:
        with tarfile.TarFile(fileobj=window, mode="r") as archive:  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them in memory
                if member.size < 0:  # tarfile would loop forever
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
