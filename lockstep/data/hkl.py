"""Reading and writing of .hkl files that hold one array.

h5py finds the dataset's offset; then the bytes are read directly into the caller's buffer. `hickle.load` is
not used, because it unpickles the content, is several times slower, and can't open files of hickle 1 to 3.
Written files have the layout of hickle 5, which can open them. hickle need not be installed.

The array's name in a file is `data` in versions 1, 4 and 5 of hickle, and `data_0` in versions 2 and 3.
"""

import errno
import itertools
import os
import pickle
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from lockstep.data import c01b
from lockstep.errors import UserError
from lockstep.files import cause_of, check_regular, write_bytes

# (batch, row, column, channel); (channel, row, column, batch): theano_alexnet's
Layout = Literal["b01c", "c01b"]

_NAMES = ("data", "data_0")
_HICKLE = "5.0.3"  # whose layout `write` follows
_HEADERS = 1 << 16  # largest number of bytes in a file beside its array
_PAUSE_SECONDS = 0.1  # before a file is read again; doubled each time, up to a limit
_LONGEST_PAUSE = 1.0
_NDARRAY = pickle.dumps(np.ndarray, protocol=4)


@dataclass(frozen=True)
class HklArray:
    """One array in a .hkl file. `offset` is its first byte, or None if only HDF5 can decode it.

    The first axis of `shape` are the rows (images), whatever the layout in the file.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None
    stamp: tuple[int, int, int]  # of the file: inode, size in bytes, time of change in ns
    layout: Layout = "b01c"

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]


def inspect(path: str | Path) -> HklArray:
    """Find the array in a .hkl file. Only its header is read.

    Raises:
        UserError: The file is missing, truncated, not HDF5, or does not hold exactly one array.
    """
    try:
        check_regular(Path(path))
        with h5py.File(path, "r") as file:
            return _find_array(str(path), file)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (OSError, RuntimeError, KeyError) as error:  # h5py raises these for damaged files
        what = "can't be read" if getattr(error, "errno", None) else "is not a whole .hkl (HDF5) file"
        raise UserError(f"{path}: {what}: {cause_of(error)}") from error


def _find_array(path: str, file: h5py.File) -> HklArray:
    names = [name for name in _NAMES if isinstance(file.get(name), h5py.Dataset)]
    if len(names) != 1 or not isinstance(file[names[0]].dtype, np.dtype):
        raise UserError(f"{path}: must hold one array named 'data' (or 'data_0')")
    dataset = file[names[0]]
    if not _is_here(file, names[0]):
        raise UserError(f"{path}: its array is in another file, by a link: copy it into this one")
    if dataset.dtype.kind not in "uif" or dataset.ndim == 0:
        raise UserError(f"{path}: holds {dataset.dtype} of shape {dataset.shape}, not an array of numbers")
    # None for chunked or compressed storage, and for arrays without data
    offset = dataset.id.get_offset() if dataset.dtype.isnative else None
    status = os.stat(path)
    array = HklArray(path, names[0], dataset.shape, dataset.dtype.newbyteorder("="), offset, _stamp(status))
    end = (offset or 0) + dataset.size * dataset.dtype.itemsize
    if offset is not None and status.st_size < end:
        raise UserError(f"{path}: is truncated: {status.st_size} bytes, {end} are needed")
    return array


def _is_here(file: h5py.File, name: str) -> bool:
    """Return whether an array's bytes are in the file itself. HDF5 has three ways to link to other files."""
    dataset = file[name]
    link = file.get(name, getlink=True)
    return isinstance(link, h5py.HardLink) and not dataset.external and not dataset.is_virtual


def as_c01b(array: HklArray) -> HklArray:
    """Return the array as images in the layout (channel, row, column, batch)."""
    channel, row, column, batch = array.shape
    return replace(array, shape=(batch, row, column, channel), layout="c01b")


class _EndsTooEarly(OSError):
    """A read returned fewer bytes than the file has."""


def read_rows(array: HklArray, first: int, out: np.ndarray, retries: int = 0) -> None:
    """Read rows of an array. Images of either layout arrive as (row, column, channel).

    Args:
        array: The array; all bytes of a c01b file are read, whatever the number of rows.
        first: The first row to read.
        out: C-contiguous (rows, *row_shape), overwritten with len(out) rows.
        retries: Further attempts after a disk error, with growing pauses.

    Raises:
        UserError: The file can't be read, or it changed since `inspect`. The message names it.
    """
    assert out.flags.c_contiguous and out.dtype == array.dtype and out.shape[1:] == array.row_shape
    assert first >= 0 and first + len(out) <= array.shape[0]
    if len(out) == 0:
        return
    for n_tries in itertools.count(1):
        try:
            _read_rows(array, first, out)
            return
        except (OSError, RuntimeError, KeyError) as error:
            if n_tries > retries or not _may_pass(error):
                again = f" (tried {n_tries} times)" if n_tries > 1 else ""
                words = " ".join(str(error).split())  # HDF5's messages have several lines
                raise UserError(f"{array.path}: can't be read{again}: {words}") from error
        time.sleep(min(_PAUSE_SECONDS * 2 ** (n_tries - 1), _LONGEST_PAUSE))


def _read_rows(array: HklArray, first: int, out: np.ndarray) -> None:
    if array.layout == "c01b":
        _read_c01b(array, first, out)
    elif array.offset is None:
        with _opened_by_hdf5(array) as file:
            file[array.name].read_direct(out, np.s_[first : first + len(out)])
    else:
        with _opened(array) as descriptor:
            _read_bytes(descriptor, array.offset + first * out[0].nbytes, out)


def _may_pass(error: Exception) -> bool:
    """Return whether another attempt may succeed. HDF5 has the system's error only in its message."""
    received = f"errno = {errno.EIO}," in str(error)
    return received or isinstance(error, _EndsTooEarly) or getattr(error, "errno", None) == errno.EIO


def _read_c01b(array: HklArray, first: int, out: np.ndarray) -> None:
    batch, height, width, channels = array.shape
    stored = (channels, height, width, batch)
    if array.offset is None:
        with _opened_by_hdf5(array) as file:
            images = file[array.name][...].reshape(channels, -1, batch)

        def copy(channel: int, pixel: int, planes: np.ndarray) -> None:
            planes[...] = images[channel, pixel : pixel + len(planes)]

        c01b.read_images(copy, stored, first, out)
        return
    offset = array.offset
    with _opened(array) as descriptor:

        def read(channel: int, pixel: int, planes: np.ndarray) -> None:
            _read_bytes(descriptor, offset + (channel * height * width + pixel) * batch, planes)

        c01b.read_images(read, stored, first, out)


@contextmanager
def _opened(array: HklArray) -> Iterator[int]:
    """Open the file and yield its descriptor. Raise OSError if it is not the one that was inspected."""
    with open(array.path, "rb") as file:
        _check_stamp(array, os.fstat(file.fileno()))
        yield file.fileno()


def _opened_by_hdf5(array: HklArray) -> h5py.File:
    _check_stamp(array, os.stat(array.path))
    return h5py.File(array.path, "r")


def _check_stamp(array: HklArray, status: os.stat_result) -> None:
    if _stamp(status) != array.stamp:
        raise OSError("it was changed after the start of the run")


def _read_bytes(descriptor: int, offset: int, out: np.ndarray) -> None:
    view = out.reshape(-1).view(np.uint8).data
    while view:
        n_bytes = os.preadv(descriptor, [view], offset)
        if n_bytes == 0:
            raise _EndsTooEarly(f"the file ends {len(view)} bytes too early")
        view, offset = view[n_bytes:], offset + n_bytes


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def read(path: str | Path) -> np.ndarray:
    """Return the whole array of a .hkl file."""
    array = inspect(path)
    out = np.empty(array.shape, array.dtype)
    read_rows(array, 0, out)
    return out


def write(path: str | Path, array: np.ndarray) -> None:
    """Write `array` in the layout of hickle 5, which hickle 4.1 and newer open. The write is atomic.

    Raises:
        UserError: The disk is full or can't be written to.
    """
    with _in_memory(array) as file:
        file.attrs["HICKLE_VERSION"] = _HICKLE
        file.attrs["HICKLE_PYTHON_VERSION"] = platform.python_version()
        dataset = file.create_dataset("data", data=np.ascontiguousarray(array))
        types = file.create_group("hickle_types_table", track_order=True)
        # The pickled NumPy type. hickle requires it; Lockstep never reads it.
        kind = types.create_dataset("0", data=np.frombuffer(_NDARRAY, "S1").reshape(1, -1))
        kind.attrs["base_type"] = types.create_dataset("ndarray", data=h5py.Empty("S1")).ref
        dataset.attrs["np_dtype"] = array.dtype.str
        dataset.attrs["type"] = kind.ref
        write_bytes(Path(path), _content(file))


def write_hickle2(path: str | Path, array: np.ndarray) -> None:
    """Write `array` in the layout of hickle 2, which only hickle 2 opens. The write is atomic.

    Raises:
        UserError: The disk is full or can't be written to.
    """
    text = h5py.string_dtype("ascii")
    with _in_memory(array) as file:
        file.attrs["CLASS"], file.attrs["VERSION"] = "hickle", 2
        file.attrs["type"] = np.array(["hickle"], text)
        file.create_dataset("data_0", data=array).attrs["type"] = np.array(["ndarray"], text)
        write_bytes(Path(path), _content(file))


def _in_memory(array: np.ndarray) -> h5py.File:
    """Make an HDF5 file in memory: the library crashes at exit if a full disk took half of a file."""
    room = array.nbytes + _HEADERS
    return h5py.File("memory", "w", libver="earliest", driver="core", backing_store=False, block_size=room)


def _content(file: h5py.File) -> bytes:
    file.flush()
    return bytes(file.id.get_file_image())
