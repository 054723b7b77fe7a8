"""Which rows a call uses, and who has which of them. Pure functions; nothing here knows processes or memory.

A *choice* is what `choose` makes of a batch: a slice with a step of 1 between two known rows, whose excerpt
is a view, or an int64 array of row numbers, whose excerpt is a copy.
"""

import operator
from typing import Any

import numpy as np

Choice = slice | np.ndarray


def share(n_rows: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """The rows [first, last) of `rank`: n rows are divided as evenly as possible, in rank order."""
    return n_rows * rank // n_ranks, n_rows * (rank + 1) // n_ranks


def choose(batch: Any, length: int, what: str) -> Choice:
    """The rows that `batch` chooses of `length`, in its order.

    batch: None (all rows), an int (the first so many), a slice, a list, tuple or array of integers, or a mask
    of `length` booleans. Numbers below zero count from the end. what: names the batch in errors.

    Raises TypeError for any other kind, ValueError for rows that are not there.
    """
    if batch is None:
        return slice(0, length)
    if isinstance(batch, slice):
        return _choose_slice(batch, length, what)
    if isinstance(batch, list | tuple | np.ndarray) and np.ndim(batch):
        return _choose_listed(np.asarray(batch), length, what)
    return slice(0, _first_rows(batch, length, what))


def count(choice: Choice) -> int:
    """How many rows."""
    return choice.stop - choice.start if isinstance(choice, slice) else len(choice)


def part(choice: Choice, first: int, last: int) -> Choice:
    """The rows number first to last of those chosen."""
    if isinstance(choice, slice):
        return slice(choice.start + first, choice.start + last)
    return choice[first:last]


def excerpt(array: np.ndarray, choice: Choice) -> np.ndarray:
    """The chosen rows: a view for a slice, one copy for row numbers."""
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
