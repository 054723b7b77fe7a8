"""The rows that a call uses: their division among the ranks, and each rank's into slices.

These are pure functions on numbers and arrays; calling.py uses them in each call.

A *choice* is the result of `choose`: a slice with step 1, whose excerpt is a view, or an int64 array of row
numbers, whose excerpt is a copy.
"""

import operator
from typing import Any

import numpy as np

Choice = slice | np.ndarray


def divide(n_rows: int, part: int, n_parts: int) -> tuple[int, int]:
    """Return the rows [first, last) of one of n_parts equal parts, which are ranks or slices."""
    return n_rows * part // n_parts, n_rows * (part + 1) // n_parts


def cut_into_slices(n_rows: int, n_slices: int) -> list[tuple[int, int]]:
    """Return the rows [first, last) of each of a rank's slices that has any."""
    n_parts = min(n_slices, n_rows)  # of more parts than rows, those that are not empty have one row each
    return [divide(n_rows, number, n_parts) for number in range(n_parts)]


def choose(batch: Any, length: int, what: str) -> Choice:
    """Return the rows that `batch` chooses of `length` rows, in the order of the batch.

    Args:
        batch: None for all rows, an int for the first rows, a slice, a list, tuple, array or tensor of
            integers, or a mask of `length` booleans. Negative numbers count from the end.
        what: Name of the batch in error messages.

    Raises:
        TypeError: The batch has any other type.
        ValueError: A row does not exist.
    """
    if batch is None:
        return slice(0, length)
    if isinstance(batch, slice):
        return _choose_slice(batch, length, what)
    batch = as_listed(batch)
    if isinstance(batch, list | tuple | np.ndarray) and np.ndim(batch):
        return _choose_listed(np.asarray(batch), length, what)
    return slice(0, _first_rows(batch, length, what))


def as_listed(batch: Any) -> Any:
    """Return a tensor or series of row numbers as a NumPy array, and anything else unchanged.

    A tensor of one number would otherwise be a number of rows, since torch makes an int of it.
    """
    return np.asarray(batch) if hasattr(batch, "__array__") and np.ndim(batch) else batch


def count(choice: Choice) -> int:
    """Return the number of chosen rows."""
    return choice.stop - choice.start if isinstance(choice, slice) else len(choice)


def part(choice: Choice, first: int, last: int) -> Choice:
    """Return the chosen rows [first, last)."""
    if isinstance(choice, slice):
        return slice(choice.start + first, choice.start + last)
    return choice[first:last]


def excerpt(array: np.ndarray, choice: Choice) -> np.ndarray:
    """Return the chosen rows of an array: a view for a slice, a copy for row numbers."""
    if isinstance(choice, slice):
        return array[choice]
    return array.take(choice, axis=0)


def _first_rows(batch: Any, length: int, what: str) -> int:
    try:
        if isinstance(batch, bool | np.bool):
            raise TypeError
        number = operator.index(batch)
    except TypeError:
        raise TypeError(
            f"{what} is {type(batch).__name__}: give an int, a slice, or a list, tuple or array of integers"
        ) from None
    if not 0 <= number <= length:
        raise ValueError(f"{what}={number}: there are {length} rows")
    return number


def _choose_slice(batch: slice, length: int, what: str) -> Choice:
    for number in (batch.start, batch.stop, batch.step):
        if number is not None and not hasattr(number, "__index__"):
            raise TypeError(f"{what}: {batch} needs integers, not {type(number).__name__}")
    for end in (batch.start, batch.stop):
        if end is not None and not -length <= operator.index(end) <= length:
            raise ValueError(f"{what}: {batch} goes past the end: there are {length} rows")
    first, last, step = batch.indices(length)
    if step == 1:
        return slice(first, max(first, last))
    return np.arange(first, last, step, dtype=np.int64)


def _choose_listed(batch: np.ndarray, length: int, what: str) -> np.ndarray:
    if batch.ndim != 1:
        raise ValueError(f"{what} has {batch.ndim} dimensions: row numbers are a list")
    if batch.dtype == bool:
        if len(batch) != length:
            raise ValueError(f"{what}: a mask of {len(batch)} for {length} rows")
        return np.flatnonzero(batch).astype(np.int64, copy=False)
    if len(batch) == 0:
        return np.zeros(0, np.int64)
    if batch.dtype.kind not in "iu":
        raise TypeError(f"{what} has dtype {batch.dtype}: row numbers are integers")
    least, most = int(batch.min()), int(batch.max())
    if most >= length or least < -length:
        wrong = most if most >= length else least
        raise ValueError(f"{what}: row {wrong} goes past the end: there are {length} rows")
    numbers = batch.astype(np.int64, copy=False)
    return np.where(numbers < 0, numbers + length, numbers) if least < 0 else numbers
