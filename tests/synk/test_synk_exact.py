"""Every mode returns the result of one process on all rows, for any ranks, slices, rows and kind of batch."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synk_teams import largest_error, team

import lockstep.synk as synk

N_ROWS = 23
BOUNDS = {"float64": 1e-10, "float32": 1e-5}
FOLDS = {
    "avg": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "prod": lambda rows: rows.prod(0),
    "gather": lambda rows: rows,
}


def build(dtype: str) -> SimpleNamespace:
    """A function with an output and an update for every mode, one on stored rows, and their data."""
    x = pt.TensorType(dtype, (None, None))("x")
    y = pt.TensorType(dtype, (None,))("y")
    weight = pt.TensorType(dtype, ())("weight")
    rows = pt.tanh(x) * weight + y[:, None]
    folds = {
        "avg": rows.mean(0),
        "sum": rows.sum(0),
        "max": rows.max(0),
        "min": rows.min(0),
        "prod": rows.prod(0),
        "gather": rows,
    }
    zero = np.zeros(3, dtype)
    shareds = {mode: pytensor.shared(zero + 0.5, name=f"s_{mode}") for mode in FOLDS if mode != "gather"}
    updates = [(shared, folds[mode] + 2 * shared, mode) for mode, shared in shareds.items()]
    f = synk.function(
        [x, y], [(fold, mode) for mode, fold in folds.items()], [weight], updates=updates, name=f"f_{dtype}"
    )
    stored = pytensor.shared(np.zeros((1, 3), dtype), name="stored")
    g = synk.function(
        [], [(pt.tanh(stored).sum(0), "sum"), pt.tanh(stored).mean(0)], sliceable_shareds=[stored]
    )
    random = np.random.default_rng(5)
    values = random.uniform(0.5, 1.5, (N_ROWS, 3)).astype(dtype)
    return SimpleNamespace(
        f=f,
        g=g,
        shareds=shareds,
        stored=stored,
        dtype=dtype,
        x=values,
        y=random.uniform(-0.2, 0.2, N_ROWS).astype(dtype),
    )


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def functions(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with team(request.param, master_rank=request.param // 2) as size:
        built = {dtype: build(dtype) for dtype in BOUNDS}
        synk.distribute()
        for case in built.values():
            case.data = case.f.build_inputs(case.x, case.y, 1.0)
        yield {"size": size, **built}


def batches(length: int) -> st.SearchStrategy[Any]:
    numbers = st.lists(st.integers(0, length - 1), min_size=1, max_size=40)
    ends = st.integers(0, length)
    return st.one_of(
        st.none(),
        st.integers(1, length),
        st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1])),
        numbers,
        numbers.map(lambda listed: np.array(listed, np.int32)),
        st.lists(st.booleans(), min_size=length, max_size=length).map(np.array),
    )


def chosen(array: np.ndarray, batch: Any) -> np.ndarray:
    if batch is None:
        return array
    return array[:batch] if isinstance(batch, int) else array[batch]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(N_ROWS), st.integers(1, 5), st.sampled_from(list(BOUNDS)), st.booleans())
def test_outputs_and_updates_are_those_of_one_process(
    functions: dict[str, Any], batch: Any, n_slices: int, dtype: str, from_data: bool
) -> None:
    case = functions[dtype]
    x, y = chosen(case.x, batch), chosen(case.y, batch)
    inputs = case.data if from_data else (case.x, case.y, 1.0)
    if len(x) == 0:
        with pytest.raises(ValueError, match="no rows"):
            case.f(*inputs, batch=batch)
        return
    one = case.f.alone(x, y, np.asarray(1, dtype))
    for shared in case.shareds.values():
        shared.set_value(np.full(3, 0.5, dtype))
    synk.broadcast(list(case.shareds.values()))
    before = {mode: synk.gather(shared) for mode, shared in case.shareds.items()}
    found = case.f(*inputs, batch=batch, num_slices=n_slices)
    again = case.f(*inputs, batch=batch, num_slices=n_slices, output_subset=list(range(6)))
    rows = np.tanh(x) + y[:, None]
    for mode, value, repeated, alone in zip(FOLDS, found, again, one, strict=True):
        expected = FOLDS[mode](rows)
        assert value.dtype == dtype
        assert np.array_equal(value, repeated), f"{mode}: another call, other bits"
        if mode in ("max", "min", "gather"):
            assert np.array_equal(value, alone), mode
        assert largest_error(value, expected) <= BOUNDS[dtype], mode
    check_updates(functions["size"], case, rows, before, n_slices)


def check_updates(size: int, case: Any, rows: np.ndarray, before: dict[str, Any], n_slices: int) -> None:
    """Return each rank's value after two calls: the reduction of its own slices, from the old values."""
    for mode, shared in case.shareds.items():
        after = synk.gather(shared)
        for rank in range(size):
            mine = rows[len(rows) * rank // size : len(rows) * (rank + 1) // size]
            value = before[mode][rank]
            for _ in range(2):
                value = update(mine, value, mode, n_slices)
            assert largest_error(after[rank], value) <= 10 * BOUNDS[case.dtype], (mode, rank)


def update(mine: np.ndarray, value: np.ndarray, mode: str, n_slices: int) -> np.ndarray:
    if not len(mine):
        return value
    parts = [mine[len(mine) * i // n_slices : len(mine) * (i + 1) // n_slices] for i in range(n_slices)]
    parts = [part for part in parts if len(part)]
    new = np.stack([FOLDS[mode](part) + 2 * value for part in parts])
    if mode == "avg":
        return np.average(new, 0, [len(part) for part in parts])
    return FOLDS[mode](new)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 4))
def test_stored_rows_are_chosen_on_each_rank(
    functions: dict[str, Any], data: st.DataObject, n_slices: int
) -> None:
    size, case = functions["size"], functions["float64"]
    n_rows = data.draw(st.integers(size, N_ROWS))
    synk.scatter(case.stored, case.x, batch=n_rows)
    bounds = [n_rows * rank // size for rank in range(size + 1)]
    own = [case.x[first:last] for first, last in pairwise(bounds)]
    shortest = min(map(len, own))
    each = [data.draw(batches(len(part))) for part in own]
    kinds = [slice(0, shortest), [0] * 3, np.array([shortest - 1], np.int16), list(each)]
    batch_s = data.draw(st.sampled_from(kinds))
    if batch_s is kinds[3]:
        each = [slice(None) if b is None or isinstance(b, int) else b for b in each]
        batch_s, parts = each, [part[b] for part, b in zip(own, each, strict=True)]
    else:
        parts = [part[batch_s] for part in own]
    everything = np.tanh(np.concatenate(parts))
    if not len(everything):
        with pytest.raises(ValueError, match="no rank has rows"):
            case.g(batch_s=batch_s)
        return
    total, mean = case.g(batch_s=batch_s, num_slices=n_slices)
    assert largest_error(total, everything.sum(0)) < 1e-10
    assert largest_error(mean, everything.mean(0)) < 1e-10
    assert np.array_equal(synk.gather(case.stored, nd_up=0), case.x[:n_rows]), "the stored rows stay"


@pytest.mark.parametrize("n_slices", [1, 3])
def test_a_minibatch_goes_row_by_row_with_the_batch(functions: dict[str, Any], n_slices: int) -> None:
    case = functions["float64"]
    batch = np.array([5, 1, 22, 7, 7, 0, 11], np.uint8)
    of_batch = synk.data(np.arange(9.0), minibatch=True)  # longer than the batch: its first rows count
    rows = np.tanh(case.x[batch]) + np.arange(7.0)[:, None]
    found = case.f(case.data[0], of_batch, case.data[2], batch=batch, num_slices=n_slices)
    for mode, value in zip(FOLDS, found, strict=True):
        assert largest_error(value, FOLDS[mode](rows)) <= BOUNDS["float64"], mode
    whole = case.f(case.data[0], of_batch, case.data[2], batch=slice(2, 9))
    assert largest_error(whole[5], np.tanh(case.x[2:9]) + np.arange(7.0)[:, None]) <= 1e-12


def test_a_slice_for_each_row_is_as_exact_as_few_slices(functions: dict[str, Any]) -> None:
    """Rounding of equal numbers in float32 goes the same way at each step, so that its errors add up."""
    x, total = pt.fmatrix("x"), pytensor.shared(np.zeros(2, "f4"), name="total")
    f = synk.function([x], [(x.sum(0), "sum"), x.mean(0)], updates=[(total, x.sum(0), "sum")])
    synk.distribute()
    n_rows = 4000 * functions["size"]
    found, mean = f(np.full((n_rows, 2), 0.1, "f4"), num_slices=n_rows)
    assert found.dtype == mean.dtype == np.float32
    assert largest_error(found, np.full(2, 0.1 * n_rows)) <= BOUNDS["float32"]
    assert largest_error(mean, np.full(2, 0.1)) <= BOUNDS["float32"]
    assert largest_error(synk.get_value(0, total), np.full(2, 400.0)) <= BOUNDS["float32"]
