"""The rows that a batch chooses and their division among ranks, compared with NumPy's indexing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.synk import rows

LENGTHS = st.integers(0, 60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_ranks_divide_rows_evenly_and_in_order(n_rows: int, n_ranks: int) -> None:
    bounds = [rows.divide(n_rows, rank, n_ranks) for rank in range(n_ranks)]
    assert [row for first, last in bounds for row in range(first, last)] == list(range(n_rows))
    sizes = [last - first for first, last in bounds]
    assert max(sizes) - min(sizes) <= 1


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, object]:
    """A number of rows, and a batch of any kind that is right for it."""
    length = draw(st.integers(1, 40))
    number = st.integers(-length, length - 1)
    end = st.none() | st.integers(-length, length)
    numbers = st.lists(number, max_size=50)
    kind = draw(st.sampled_from(["int", "slice", "list", "tuple", "array", "mask", "none"]))
    if kind == "int":
        return length, draw(st.integers(0, length))
    if kind == "slice":
        step = draw(st.none() | st.integers(-4, 4).filter(bool))
        return length, slice(draw(end), draw(end), step)
    if kind == "array":
        dtype = draw(st.sampled_from(["i1", "i2", "i4", "i8"]))
        return length, np.array(draw(numbers), dtype)
    if kind == "mask":
        return length, np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    return length, {"list": list, "tuple": tuple, "none": lambda _: None}[kind](draw(numbers))


@settings(deadline=None)
@given(batches(), st.integers(1, 5), st.integers(1, 4))
def test_shares_and_slices_of_a_batch_are_what_numpy_gives(
    case: tuple[int, object], n_ranks: int, n_slices: int
) -> None:
    length, batch = case
    whole = np.arange(3 * length).reshape(length, 3)
    if batch is None:
        expected = whole
    elif isinstance(batch, int):
        expected = whole[:batch]
    else:
        index = batch if isinstance(batch, slice) else np.asarray(batch, None if len(batch) else int)
        expected = whole[index]
    chosen = rows.choose(batch, length, "batch")
    assert rows.count(chosen) == len(expected)
    found = []
    for rank in range(n_ranks):
        mine = rows.part(chosen, *rows.divide(rows.count(chosen), rank, n_ranks))
        for number in range(n_slices):
            found.append(
                rows.excerpt(whole, rows.part(mine, *rows.divide(rows.count(mine), number, n_slices)))
            )
    assert np.array_equal(np.concatenate(found), expected)


def test_a_slice_is_a_view_and_row_numbers_are_a_copy() -> None:
    whole = np.zeros((10, 2))
    assert np.shares_memory(rows.excerpt(whole, rows.choose(slice(2, 7), 10, "batch")), whole)
    assert rows.excerpt(whole, rows.choose([1, 3], 10, "batch")).base is None
    assert rows.excerpt(whole, rows.choose(slice(0, 9, 2), 10, "batch")).flags.c_contiguous


class Series:
    """A sequence that is no array but can become one, and an int if it has one element, like torch's."""

    def __init__(self, numbers: list[int]) -> None:
        self._array = np.array(numbers)
        self.ndim = self._array.ndim

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self._array

    def __index__(self) -> int:
        return int(self._array.item())


@pytest.mark.parametrize("make", [Series, torch.tensor])
def test_a_tensor_of_row_numbers_is_no_number_of_rows(make: Callable[[object], object]) -> None:
    for numbers in ([3], [3, 4], [-1]):
        chosen = rows.choose(make(numbers), 10, "batch")
        assert isinstance(chosen, np.ndarray)
        assert chosen.tolist() == [number % 10 for number in numbers]
    assert rows.choose(make(3), 10, "batch") == slice(0, 3)


def test_a_mask_of_torch() -> None:
    chosen = rows.choose(torch.tensor([True]), 1, "batch")
    assert isinstance(chosen, np.ndarray) and chosen.tolist() == [0]


def test_more_slices_than_rows_are_one_for_each_row() -> None:
    assert rows.cut_into_slices(3, 10**12) == [(0, 1), (1, 2), (2, 3)]
    assert rows.cut_into_slices(0, 5) == []
    assert rows.cut_into_slices(5, 2) == [(0, 2), (2, 5)]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (11, ValueError, "there are 10 rows"),
        (-1, ValueError, "there are 10 rows"),
        (slice(5, 11), ValueError, "past the end"),
        (slice(-11, 3), ValueError, "past the end"),
        (slice(0, 1.5), TypeError, r"slice\(0, 1.5, None\) needs integers, not float"),
        ([0, 10], ValueError, "row 10 goes past the end"),
        (np.array([-11]), ValueError, "row -11 goes past the end"),
        (np.array([2**63], np.uint64), ValueError, "past the end"),
        (np.zeros((2, 2), int), ValueError, "2 dimensions"),
        (np.ones(9, bool), ValueError, "a mask of 9 for 10 rows"),
        ([0.5], TypeError, "integers"),
        (1.5, TypeError, "float"),
        (True, TypeError, "bool"),
        ("abc", TypeError, "str"),
        ({1}, TypeError, "set"),
    ],
)
def test_what_is_no_batch_is_refused(batch: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rows.choose(batch, 10, "batch")
