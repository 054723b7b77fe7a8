"""Files that appear complete or not at all, .npy files, JSON of unknown origin, and checksums of files."""

import errno
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from lockstep.errors import UserError
from lockstep.text import as_valid, one_line

_UNUSABLE = {
    errno.EACCES: "Change its permissions or those of the folders above it, or give another path.",
    errno.ENAMETOOLONG: "Give a shorter path; several paths are separate arguments.",
}
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # of Python; of HDF5 and torch; of safetensors


def publish(temporary: str | Path, path: str | Path) -> None:
    """Flush a finished temporary file to the disk, then rename it atomically.

    Its permissions follow the umask.

    Raises:
        OSError: A step fails.
    """
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.chmod(temporary, 0o666 & ~_umask())  # tempfile creates files that only their owner can read
    os.replace(temporary, path)
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    """Return the umask without setting it, as os.umask() would, for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def write_with(path: Path, dump: Callable[[str], None]) -> None:
    """Write a file with a function that takes a path, completely or not at all.

    Args:
        dump: Writes a temporary file beside `path`.

    Raises:
        UserError: The disk is full or can't be written. No temporary file is left.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        dump(temporary)
        publish(temporary, path)
    except BaseException as error:
        if temporary:
            remove_useless(Path(temporary))
        if isinstance(error, _WRITE_ERRORS):
            raise UserError(f"{path}: can't be written: {cause_of(error)}") from error
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all. Raise UserError on failure."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        remove_useless(temporary)
        raise UserError(f"{path}: can't be written: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8, completely or not at all. Raise UserError on failure."""
    write_bytes(path, as_valid(text).encode())


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file, completely or not at all. Raise UserError on failure."""
    write_bytes(path, as_npy(array))


def as_npy(array: np.ndarray | np.generic) -> bytes:
    """Return the content of a .npy file. np.save to a path hides the cause of a failure, or all of it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def check_regular(path: Path) -> None:
    """Raise UserError for what may be read without end: a device may be endless, a pipe have no writer."""
    if not path.is_file() and path.exists():
        raise UserError(f"{path}: is not a regular file")


def read_array(path: Path) -> np.ndarray:
    """Read a .npy file. Raise UserError if it is damaged or needs unpickling."""
    check_regular(path)
    try:
        content = path.read_bytes()  # NumPy would mistake a disk error for the end of the file
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    if not content.startswith(np.lib.format.MAGIC_PREFIX):  # NumPy would advise to unpickle it
        text = "it does not begin as one. numpy.save writes such files"
        raise UserError(f"{path}: is not a whole .npy file of numbers or names: {text}")
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # NumPy raises many types for a file of another format
        raise UserError(f"{path}: is not a whole .npy file of numbers or names: {error}") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path}: is not a .npy file of one array")
    return array


@contextmanager
def name_in_utf8(path: Path) -> Iterator[str]:
    """Yield a name of an existing file for the safetensors package, which takes no other encoding.

    Raises:
        OSError: The file can't be opened.
    """
    if as_valid(str(path)) == str(path):
        yield str(path)
        return
    with open(path, "rb") as file:
        yield f"/proc/self/fd/{file.fileno()}"


def parse_json(text: str | bytes) -> Any:
    """Return a value of JSON; None if the text is none, as a line that a kill has torn."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    """Return the event of a line of a run's log; None if the line is damaged."""
    event = parse_json(line)
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def cause_of(error: Exception) -> str:
    """Return the cause of a file error in one line: the system's message if there is an errno."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else " ".join(str(error).split())


def remove_useless(path: Path) -> None:
    """Remove a useless file. A failure to do so is not the error to report."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raise OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def refusing_unusable_paths() -> Iterator[None]:
    """Raise UserError for a path that may not be looked at, or whose name is too long. Also a decorator.

    Path.exists() and Path.is_dir() raise OSError for such a path, and return False for a missing one.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE or error.filename is None:
            raise
        name, cure = one_line(str(error.filename)), _UNUSABLE[error.errno]
        if error.errno == errno.ENAMETOOLONG:
            name = f"{name[:200]}..."
        raise UserError(f"{name}: can't be used: {error.strerror}. {cure}") from error


def working_directory() -> str:
    """Return the working directory. Raise UserError if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory does not exist any more. Change to another one.") from error


def program_folder() -> Path:
    """Return the folder of train.py, config.yaml, models/ and preprocessing/.

    It is the repository, or a folder inside the installed package.
    """
    packaged = Path(__file__).parent / "_program"
    return packaged if packaged.is_dir() else packaged.parent.parent
