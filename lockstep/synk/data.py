"""Arrays in shared memory, as inputs of functions and as values of collectives."""

import itertools
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from lockstep.memory.host import HostBlock
from lockstep.synk.blocks import ArrayLocation
from lockstep.synk.interrupts import defer_signals
from lockstep.synk.team import Team

_unnamed = itertools.count()


class SharedArray(np.ndarray):
    """A NumPy array on a block. As an argument of a `multiprocessing.Process` it is the same memory there.

    Elsewhere it is pickled by value, like any array; its parts, and results computed from it, always are.
    """

    _block: HostBlock | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._block is None or context.get_spawning_popen() is None:
            return np.asarray(self).__reduce_ex__(protocol)
        if self._block.is_closed:
            raise ValueError(
                "the memory of this array belongs to no Data any more: keep the Data, and take its .data "
                "again after it has grown"
            )
        descriptor = reduction.DupFd(self._block.descriptor)
        return _open_in_child, (descriptor, self._block.n_bytes, self.dtype.str, self.shape)


def _on_block(block: HostBlock, dtype: str, shape: tuple[int, ...]) -> SharedArray:
    array = block.array(dtype, shape).view(SharedArray)
    array._block = block
    return array


def _open_in_child(descriptor: Any, n_bytes: int, dtype: str, shape: tuple[int, ...]) -> SharedArray:
    return _on_block(HostBlock(descriptor.detach(), n_bytes), dtype, shape)


class Data:
    """A NumPy-like array that every rank can read.

    The caller allocates its memory. A rank maps it when a call first needs it, and all ranks release it when
    the Data is garbage-collected. Create it with `lockstep.synk.data` or `Function.build_inputs`.

    Attributes:
        minibatch: The array holds only the rows of a batch: row i belongs to row i of the batch.
    """

    def __init__(self, team: Team, dtype: Any, ndim: int, minibatch: bool = False, name: str = "") -> None:
        self._team, self._ndim = team, int(ndim)
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        if self._dtype.hasobject:
            raise TypeError(f"data {name!r}: dtype {self._dtype} holds Python objects, which can't be shared")
        self.minibatch, self.name = bool(minibatch), name or f"data{next(_unnamed)}"
        self._number: int | None = None
        self._release: Any = None
        self._capacity = 0
        self._array: np.ndarray = np.empty((0,) * self._ndim, self._dtype)

    def __repr__(self) -> str:
        return f"<Data {self.name!r} {self._dtype} {self.shape}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled. Make it an input, or pass its array, .data")

    def __getitem__(self, rows: Any) -> Any:
        return self._array[rows]

    def __setitem__(self, rows: Any, values: Any) -> None:
        self._array[rows] = values

    def __len__(self) -> int:
        return len(self._array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=copy)

    @property
    def team(self) -> Team:
        """The team whose ranks can read it."""
        return self._team

    @property
    def is_empty(self) -> bool:
        """True if no memory is allocated."""
        return self._number is None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the data."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions, which does not change."""
        return self._ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data, without the memory that is allocated beyond it."""
        return self._array.shape

    @property
    def size(self) -> int:
        """The number of elements of the data."""
        return self._array.size

    @property
    def alloc_size(self) -> int:
        """Number of items that the allocated memory can hold."""
        return self._capacity

    @property
    def data(self) -> np.ndarray:
        """The array itself. An argument of a `multiprocessing.Process` is the same memory there."""
        if self._number is None or self._team.closed:
            return self._array
        return _on_block(self._team.context.blocks[self._number], self._dtype.str, self.shape)

    def set_value(self, value: Any, force_cast: bool = False, oversize: float = 1) -> None:
        """Copy a value, with its shape. Raises what `condition_data` and `set_shape` raise."""
        array = self.condition_data(value, force_cast)
        self._resize(array.shape, oversize, keep_rows=False)
        self._array[...] = array

    def set_length(self, length: int, oversize: float = 1) -> None:
        """Change the number of rows and keep the existing ones; raise ValueError for a length below 1."""
        if self._ndim == 0:
            raise ValueError(f"{self.name}: a scalar has no length")
        self._resize((self._whole(length), *self.shape[1:]), oversize, keep_rows=True)

    def set_shape(self, shape: int | Sequence[int], oversize: float = 1) -> None:
        """Change the shape. Rows are kept if the other dimensions are unchanged.

        Args:
            oversize: Allocate this multiple of the size, from 1 to 2. A shape that fits allocates nothing.

        Raises:
            ValueError: The number of dimensions differs, there are no rows, or oversize is out of range.
            MemoryError: The host has too little memory.
        """
        lengths = _lengths(shape)
        if len(lengths) != self._ndim:
            raise ValueError(f"{self.name} has {self._ndim} dimensions, which {lengths} would change")
        self._resize(tuple(self._whole(length) for length in lengths), oversize, keep_rows=True)

    def condition_data(self, value: Any, force_cast: bool = False) -> np.ndarray:
        """Return the array that `set_value` would copy.

        Python numbers and lists are cast as NumPy casts them (floats to float32).

        Raises:
            ValueError: The value has another number of dimensions.
            TypeError: Casting would lose information, or the dtype can't hold a whole number, and
                `force_cast` is False.
        """
        if np.ndim(value) != self._ndim:
            raise ValueError(f"{self.name} has {self._ndim} dimensions, the value has {np.ndim(value)}")
        return condition(value, self._dtype, self.name, force_cast)

    def free_memory(self) -> None:
        """Release the memory in all ranks; the Data is empty then. Only this makes alloc_size smaller."""
        with defer_signals():
            self._release_block()
            self._array = np.empty((0,) * self._ndim, self._dtype)

    def location(self) -> ArrayLocation:
        """Return the location of the array, for the ranks."""
        assert self._number is not None, f"{self.name} is empty"
        return ArrayLocation(self._number, self._dtype.str, self.shape)

    def _whole(self, length: Any) -> int:
        try:
            return operator.index(length)
        except TypeError:
            raise TypeError(f"{self.name}: the length {length!r} is not a whole number") from None

    def _resize(self, shape: tuple[int, ...], oversize: float, keep_rows: bool) -> None:
        if not 1 <= oversize <= 2:
            raise ValueError(f"{self.name}: oversize={oversize} is outside [1, 2]")
        if (shape and shape[0] < 1) or any(length < 0 for length in shape):
            raise ValueError(f"{self.name}: there is no data of shape {shape}: give it one row or more")
        if self._team.closed:  # its memory was released; in a forked child it can still be used
            raise RuntimeError(f"data {self.name!r} belongs to a closed team: call fork(), and make it again")
        n_items = math.prod(shape)
        with defer_signals():
            if self._number is None or n_items > self._capacity:
                self._move(shape, int(n_items * oversize), keep_rows)
            else:
                self._array = self._view(shape)

    def _move(self, shape: tuple[int, ...], capacity: int, keep_rows: bool) -> None:
        before = self._array
        number = self._team.allocate(max(1, capacity) * self._dtype.itemsize, f"data {self.name!r}")
        self._release_block()
        self._number, self._capacity = number, capacity
        self._release = weakref.finalize(self, _release, weakref.ref(self._team), number)
        self._release.atexit = False
        self._array = self._view(shape)
        if keep_rows and shape[1:] == before.shape[1:] and shape:
            n_rows = min(len(before), len(self._array))
            self._array[:n_rows] = before[:n_rows]

    def _view(self, shape: tuple[int, ...]) -> np.ndarray:
        assert self._number is not None
        return self._team.context.blocks.array(ArrayLocation(self._number, self._dtype.str, shape))

    def _release_block(self) -> None:
        if self._release is not None:
            self._release()
        self._number, self._release, self._capacity = None, None, 0


def _lengths(shape: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, Iterable) else (shape,)


def _release(reference: weakref.ref[Team], number: int) -> None:
    """Release a block. A finalizer that held the team would keep the program's functions in memory."""
    team = reference()
    if team is not None:
        team.release(number)


def condition(value: Any, dtype: np.dtype[Any], what: str, force_cast: bool = False) -> np.ndarray:
    """Return the value as an array of this dtype; see Data.condition_data."""
    rule: Any = "unsafe" if force_cast else "safe" if hasattr(value, "dtype") else "same_kind"
    array = as_array(value, what)
    if array.size and not np.can_cast(array.dtype, dtype, rule):
        raise TypeError(
            f"{what} is {dtype}, and casting {array.dtype} to it may lose something: cast it, or pass "
            "force_cast=True where that is taken"
        )
    if not force_cast and array.size and array.dtype.kind in "iu" and dtype.kind in "iu":
        _check_range(array, dtype, what)
    return array.astype(dtype, copy=False)


def as_array(value: Any, what: str) -> np.ndarray:
    """Return the value as an array; raise TypeError if it is a tensor that NumPy can't read, or masked."""
    if np.ma.is_masked(value):
        raise TypeError(f"{what}: values are masked, and a function would see them: give value.filled(...)")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what}: {error}") from error


def _check_range(array: np.ndarray, dtype: np.dtype[Any], what: str) -> None:
    """Raise TypeError if a whole number does not fit the dtype: NumPy would wrap it."""
    if np.can_cast(array.dtype, dtype, "safe"):
        return
    limits = np.iinfo(dtype)
    for number in (int(array.min()), int(array.max())):
        if not limits.min <= number <= limits.max:
            raise TypeError(
                f"{what} is {dtype}, which holds {limits.min} to {limits.max}, not {number}: give it another "
                "dtype, or pass force_cast=True where that is taken"
            )


def make_data(
    team: Team,
    value: Any = None,
    *,
    var: Any = None,
    dtype: Any = None,
    ndim: int | None = None,
    shape: int | Sequence[int] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Return new Data; see lockstep.synk.data."""
    if value is not None and not hasattr(value, "__array__") and hasattr(value, "owner"):
        value, var = None, value  # a symbolic variable as the first argument
    label = name or getattr(var, "name", None) or ""
    what = f"data {label!r}" if label else "data()"
    shape = None if shape is None else _lengths(shape)
    model = var if var is not None or value is None else as_array(value, what)
    dtype = dtype if dtype is not None else getattr(model, "dtype", None)
    if ndim is None:
        ndim = len(shape) if shape is not None else getattr(model, "ndim", None)
    if dtype is None or ndim is None:
        raise TypeError(f"{what}: give a value, or a variable, or dtype and ndim (or shape)")
    if np.dtype(dtype).kind not in "biufcO":  # Python objects have an error message of their own
        raise TypeError(f"{what}: {np.dtype(dtype)} is no type of numbers, which functions take")
    if shape is not None and len(shape) != ndim:
        raise ValueError(f"{what}: shape {shape} has not {ndim} dimensions")
    created = Data(team, dtype, ndim, minibatch, label)
    if shape is not None:
        created.set_shape(shape, oversize)
    if value is not None:
        created.set_value(value, force_cast, oversize)
    return created
