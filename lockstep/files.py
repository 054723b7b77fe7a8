"""Files that appear whole or not at all, and their checksums."""

import hashlib
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from lockstep.errors import UserError

_FAILURES = (OSError, RuntimeError, SafetensorError)  # of Python; of HDF5 and torch; of safetensors


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
    """Has `dump` write a temporary file beside `path`, and publishes that. Nothing is left where it fails.

    Raises UserError naming `path` where the disk is full or can't be written to.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        dump(temporary)
        publish(temporary, path)
    except BaseException as error:
        if temporary:
            _remove(Path(temporary))
        if isinstance(error, _FAILURES):
            raise UserError(f"{path}: can't be written: {cause_of(error)}") from error
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all. Raises UserError where that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise UserError(f"{path}: can't be written: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file of text in UTF-8. Raises UserError where that fails."""
    write_bytes(path, text.encode())


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a .npy file. Raises UserError where that fails, and says why, which np.save does not."""
    file = io.BytesIO()
    np.save(file, array)
    write_bytes(path, file.getvalue())


def cause_of(error: Exception) -> str:
    """What went wrong with a file, in one line: the system's words where they are known."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else " ".join(str(error).split())


def _remove(path: Path) -> None:
    """A file that is of no use. Where it can't be removed either, that is not the news."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
