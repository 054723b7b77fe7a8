"""Files that appear whole or not at all, and their checksums."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import UserError


def publish(temporary: str | Path, path: str | Path) -> None:
    """Makes a finished temporary file durable, then gives it its name in one step.

    Who may read it is what the umask says.
    """
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.chmod(temporary, 0o666 & ~_umask())  # those that tempfile makes are their owner's alone
    os.replace(temporary, path)
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    """Of this process, read without setting it: os.umask() would change it for all threads meanwhile."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def write_with(path: Path, dump: Callable[[str], None]) -> None:
    """Has `dump` write a temporary file beside `path`, and publishes that. Nothing is left where it fails."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        dump(temporary)
        publish(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a small file. Raises UserError where that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from error


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
