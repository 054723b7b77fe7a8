"""The speed of reading files, from the disk and from the page cache."""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.doctor.report import Finding
from lockstep.errors import UserError

SAMPLE_BYTES = 256 << 20
LEAST_BYTES = 16 << 20  # less is too fast to be measured
_PIECE_BYTES = 32 << 20  # larger than a processor's cache, as a batch
_MOST_SECONDS = 4.0  # limit for slow disks
_IN_MEMORY = ("tmpfs", "ramfs")
_ELSEWHERE = ("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "ceph", "lustre")
_OCTAL = re.compile(r"\\(\d{3})")


@dataclass(frozen=True)
class Sample:
    """The first n_bytes of a sequence of files. text: a description of them."""

    text: str
    paths: tuple[Path, ...]
    n_bytes: int

    def read(self, buffer: memoryview) -> Iterator[int]:
        """Read all of it into the same buffer, piece by piece, and yield the bytes of each piece."""
        left = self.n_bytes
        for path in self.paths:
            with open(path, "rb", buffering=0) as file:
                while n_bytes := file.readinto(buffer[: min(left, len(buffer))]):
                    yield n_bytes
                    left -= n_bytes


@contextmanager
def open_sample(folder: Path | None, scratch: Path) -> Iterator[Sample]:
    """Open the batch files of a folder, or a temporary file in `scratch` if they are missing or too small.

    Raises:
        UserError: The folder does not exist, or the temporary file can't be written.
    """
    paths, n_bytes = _find_batches(folder) if folder else ((), 0)
    if n_bytes >= LEAST_BYTES:
        yield Sample(f"{len(paths)} files of {folder}", paths, min(n_bytes, SAMPLE_BYTES))
        return
    with ExitStack() as stack:
        try:
            place = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch, prefix=".lockstep-doctor-"))
            path = Path(place) / "sample"
            _write(path)
        except OSError as error:
            text = f"a file of {SAMPLE_BYTES / 1e6:.0f} MB can't be written there: {error.strerror}"
            remedy = f"Name a dataset folder of at least {LEAST_BYTES / 1e6:.0f} MB to read from"
            raise UserError(f"{scratch}: {text}. {remedy}.") from error
        reason = f", because {folder} holds only {n_bytes / 1e6:.1f} MB of batches" if folder else ""
        yield Sample(f"a temporary file in {scratch}{reason}", (path,), SAMPLE_BYTES)


def _find_batches(folder: Path) -> tuple[tuple[Path, ...], int]:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder of .hkl batches")
    paths, n_bytes = [], 0
    for path in sorted(folder.glob("*.hkl")):
        paths.append(path)
        n_bytes += path.stat().st_size
        if n_bytes >= SAMPLE_BYTES:
            break
    return tuple(paths), n_bytes


def _write(path: Path) -> None:
    """Write random bytes, which no file system can compress, and flush them to the disk."""
    with open(path, "wb") as file:
        for _ in range(SAMPLE_BYTES // _PIECE_BYTES):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def measure(sample: Sample) -> tuple[float | None, Sample, list[Finding]]:
    """Measure the disk and the page cache.

    Returns:
        GB/s of the disk, None if the files are in memory; the part of the sample that is in the page cache
        now; and lines about both speeds.
    """
    kind = filesystem(sample.paths[0])
    for path in sample.paths:
        _drop_from_cache(path)
    buffer = bytearray(_PIECE_BYTES)
    n_bytes, seconds = _read(sample, buffer)
    disk, cached = n_bytes / seconds / 1e9, replace(sample, n_bytes=n_bytes)
    n_bytes, seconds = sorted(_read(cached, buffer) for _ in range(3))[1]
    cache = n_bytes / seconds / 1e9
    lines = [Finding("files to read", f"{n_bytes / 1e6:,.0f} MB, {sample.text}; file system {kind}")]
    if kind in _IN_MEMORY:
        lines.append(Finding("disk", f"none: {kind} is memory"))
    else:
        lines.append(Finding("disk", f"{disk:.2f} GB/s{_doubt(kind, disk, cache)}"))
    lines.append(Finding("page cache", f"{cache:.2f} GB/s"))
    return None if kind in _IN_MEMORY else disk, cached, lines


def filesystem(path: Path) -> str:
    """Return the type of a path's file system (proc(5), /proc/self/mountinfo)."""
    mounts: list[tuple[int, str]] = [(0, "unknown")]
    place = path.absolute().resolve()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        # a space is written \040
        mount = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split()[4]))
        if mount == place or mount in place.parents:
            mounts.append((len(mount.parts), right.split()[0]))
    depth = max(depth for depth, _ in mounts)
    return [kind for at, kind in mounts if at == depth][-1]  # the last mount hides the others


def _doubt(kind: str, disk: float, cache: float) -> str:
    """Return why the disk's speed may be that of a cache, or ''."""
    if kind == "overlay":
        return "; not to be trusted: what is below an overlay may keep its pages"
    if kind.startswith(_ELSEWHERE):
        return "; not to be trusted: whoever serves these files may have them in memory"
    if disk > cache / 2:
        return "; not to be trusted: as fast as memory"
    return ""


def _drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(sample: Sample, buffer: bytearray) -> tuple[int, float]:
    """Read the sample and return bytes and seconds. Stop at the time limit."""
    n_bytes, begin = 0, time.perf_counter()
    for piece in sample.read(memoryview(buffer)):
        n_bytes += piece
        if time.perf_counter() - begin > _MOST_SECONDS:
            break
    return n_bytes, time.perf_counter() - begin
