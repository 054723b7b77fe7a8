"""Collectives on shared variables, compared with NumPy on the values of all ranks."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synk_teams import largest_error, team

import lockstep.synk as synk
from lockstep.exchange.reduction import reduce_arrays
from lockstep.synk import session
from lockstep.synk.results import REDUCE_OPS, fractions
from lockstep.synk.rows import divide

FOLDS = {"avg": np.mean, "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(list(FOLDS)),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from(["float32", "float64", "int64"]),
    st.data(),
)
def test_fold_is_numpys(op: str, n_parts: int, n_chunks: int, dtype: str, data: st.DataObject) -> None:
    if op == "avg" and dtype == "int64":
        return
    n = n_chunks * 40_000 + data.draw(st.integers(0, 50))
    random = np.random.default_rng(n)
    parts = [random.integers(-3, 4, n).astype(dtype) for _ in range(n_parts)]
    rows = data.draw(st.lists(st.integers(1, 9), min_size=n_parts, max_size=n_parts))
    weights = fractions(rows) if op == "avg" else None
    expected = np.average(parts, 0, rows) if weights else FOLDS[op](np.stack(parts).astype(float), 0)
    outputs = [parts[0], np.empty(n, dtype)]  # an output may be one of the parts
    reduce_arrays(parts, outputs, REDUCE_OPS[op], weights)
    assert np.array_equal(outputs[0], outputs[1])
    assert largest_error(outputs[0], expected) < 1e-5


@pytest.fixture(scope="module", params=[1, 3])
def case(request: pytest.FixtureRequest) -> Iterator[Any]:
    with team(request.param, master_rank=request.param - 1) as size:
        a = pytensor.shared(np.zeros((2, 3)), name="a")
        b = pytensor.shared(np.zeros(5, "float32"), name="b")
        stored = pytensor.shared(np.zeros((1, 2)), name="stored")
        count = pytensor.shared(np.zeros(3, "int64"), name="count")
        x = pt.matrix("x")
        # join makes a new array: the value leaves its place
        leave = synk.function([], updates=[(a, pt.concatenate([a, a])[:2])], name="leave")
        f = synk.function([x], (x.mean(), "avg"), updates=[(b, pt.cast(x.mean(0), "float32"))], name="f")
        synk.function([], [(stored.sum(), "sum"), (count.sum(), "sum")])
        mean = synk.function([x], (x[0], "avg"), name="mean")
        synk.distribute()
        shareds = {"a": a, "b": b, "stored": stored, "count": count}
        yield {"size": size, **shareds, "leave": leave, "f": f, "mean": mean}


def fill(case: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Set a different value on every rank, and return the values by rank."""
    random = np.random.default_rng(len(shape))
    values = random.normal(size=(case["size"], *shape)).astype(case[name].dtype)
    for rank, value in enumerate(values):
        synk.set_value(rank, case[name], value)
    return values


@pytest.mark.parametrize("op", [*FOLDS, "c_avg"])
def test_reduce_and_all_reduce(case: Any, op: str) -> None:
    for name, shape in (("a", (2, 3)), ("b", (70_001,))):
        values = fill(case, name, shape)
        expected = FOLDS[op.removeprefix("c_")](values.astype(float), 0)
        assert largest_error(synk.reduce(case[name], op, in_place=False), expected) < 1e-5
        assert np.array_equal(synk.gather(case[name]), values), "in_place=False changes nothing"
        synk.reduce(case[name], op)
        assert largest_error(case[name].get_value(), expected) < 1e-5
        fill(case, name, shape)
        synk.all_reduce([case[name]], op, nccl=False)
        found = synk.gather(case[name])
        assert all(np.array_equal(value, found[0]) for value in found), "the same bits everywhere"
        assert largest_error(found[0], expected) < 1e-5


def test_values_that_left_their_place_or_never_fit_are_found(case: Any) -> None:
    values = fill(case, "a", (2, 3))
    case["leave"]()
    case["a"].set_value(case["a"].get_value() + 1)  # by the user, in this process
    values[case["size"] - 1] += 1
    synk.all_reduce(case["a"], "sum")
    assert largest_error(synk.get_value(0, "a"), values.sum(0)) < 1e-10
    large = fill(case, "a", (200, 300))
    synk.all_reduce("a")
    assert largest_error(synk.get_value(0, "a"), large.mean(0)) < 1e-10
    synk.broadcast("a", np.zeros((2, 3)))


def test_broadcast_and_get(case: Any) -> None:
    fill(case, "a", (2, 3))
    case["a"].set_value(np.full((2, 3), 7.0))
    synk.broadcast(case["a"])
    assert all((value == 7).all() for value in synk.gather("a"))
    synk.broadcast(["a", case["b"]], [np.ones((2, 3)), synk.data(np.arange(4, dtype="float32"))])
    for rank in range(case["size"]):
        a, b = synk.get_value(rank, ["a", "b"])
        assert (a == 1).all() and b.tolist() == [0, 1, 2, 3]
    synk.broadcast("b", np.arange(5, dtype="float32"))


def test_broadcast_of_a_view_of_the_variables_own_memory(case: Any) -> None:
    """A rank's value may be its slot in another order, by an update or by `values`."""
    a, b = (pytensor.shared(np.zeros((2, 2)), name=name) for name in ("square", "other"))
    turn = synk.function([], updates=[(a, a.T), (b, b.T)])
    synk.distribute()
    synk.broadcast([a, b], [np.arange(4.0).reshape(2, 2), np.arange(4.0, 8).reshape(2, 2)])
    turn()
    synk.broadcast(a)
    assert all(value.tolist() == [[0, 2], [1, 3]] for value in synk.gather(a))
    synk.broadcast(b)
    synk.broadcast([a, b], [each.get_value(borrow=True)[::-1] for each in (b, a)])
    assert all(value.tolist() == [[5, 7], [4, 6]] for value in synk.gather(a))
    assert all(value.tolist() == [[1, 3], [0, 2]] for value in synk.gather(b))


@pytest.mark.parametrize("as_data", [False, True])
@pytest.mark.parametrize("batch", [None, 5, slice(2, 9), [8, 0, 3, 3]])
def test_scatter_and_gather(case: Any, as_data: bool, batch: Any) -> None:
    values = np.random.default_rng(0).normal(size=(10, 2))
    expected = values if batch is None else values[:batch] if isinstance(batch, int) else values[batch]
    synk.scatter(case["stored"], synk.data(values) if as_data else values, batch=batch)
    size, n = case["size"], len(expected)
    assert synk.get_lengths("stored") == [n * (r + 1) // size - n * r // size for r in range(size)]
    assert np.array_equal(synk.gather("stored", nd_up=0), expected)
    parts = synk.gather("stored", nd_up=1)
    assert isinstance(parts, list) == (len({len(part) for part in parts}) > 1), "unequal shapes give a list"
    synk.all_gather("stored")
    assert all(np.array_equal(synk.get_value(rank, "stored"), expected) for rank in range(size))
    assert synk.get_shapes(["stored", "b"]) == [[(n, 2)] * size, [(5,)] * size]


def test_set_value_of_one_rank_also_this_one(case: Any) -> None:
    values = fill(case, "a", (2, 3))
    for rank in range(case["size"]):
        new = synk.data(np.arange(12.0).reshape(4, 3) + rank)
        synk.set_value(rank, "a", new, batch=[3, rank % 2])
        values[rank] = new[[3, rank % 2]]
        assert np.array_equal(synk.gather("a"), values)


def test_by_rows_the_mean_of_means_is_that_of_all_rows(case: Any) -> None:
    for n_rows in (1, 2, 7, 8):
        x = np.random.default_rng(n_rows).normal(size=(n_rows, 5))
        synk.broadcast("b", np.full(5, 100, "float32"))  # what a rank without rows keeps, and must not count
        case["f"](x)
        synk.all_reduce("b", by_rows=True)
        assert largest_error(synk.get_value(0, "b"), x.mean(0)) < 1e-5


@pytest.mark.parametrize("n_rows", [1, 7])
def test_by_rows_counts_those_of_a_call_in_this_process_alone(case: Any, n_rows: int) -> None:
    x = np.random.default_rng(n_rows).normal(size=(n_rows, 5))
    alone, caller = x[:1] + np.ones((4, 1)), case["size"] - 1
    case["f"](x)
    case["f"].alone(alone)
    synk.all_reduce("b", by_rows=True)
    others = x[: divide(n_rows, caller, case["size"])[0]]
    assert largest_error(synk.get_value(0, "b"), np.concatenate([others, alone]).mean(0)) < 1e-5


@pytest.mark.parametrize("variable", [0, 1])
def test_blocks_of_a_failed_collective_are_released(
    case: Any, monkeypatch: pytest.MonkeyPatch, variable: int
) -> None:
    current = session.current_team("")
    allocate, numbers, before = current.allocate, itertools.count(1), len(current.context.blocks)

    def some(n_bytes: int, what: str) -> int:
        if next(numbers) == case["size"] * (variable + 1):
            raise MemoryError("no room")
        return allocate(n_bytes, what)

    monkeypatch.setattr(current, "allocate", some)
    with pytest.raises(MemoryError, match="no room"):
        synk.broadcast(["a", "b"], [np.zeros((500, 500)), np.zeros(100_000, "f4")])
    assert len(current.context.blocks) == before


def test_blocks_of_a_failed_distribute_are_released(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = session.current_team("")
    new = pytensor.shared(np.zeros(3), name="new")
    f = synk.function([], (new.sum(), "max"))
    allocate, before = current.allocate, len(current.context.blocks)

    def no_variables(n_bytes: int, what: str) -> int:
        if what == "shared variables":
            raise MemoryError("no room")
        return allocate(n_bytes, what)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no room"):
        patch.setattr(current, "allocate", no_variables)
        synk.distribute()
    assert len(current.context.blocks) == before
    synk.distribute()
    assert f() == 0


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda c: synk.all_reduce("a", "median"), ValueError, "unknown op 'median'"),
        (lambda c: synk.all_reduce("a", "gather"), ValueError, "unknown op"),
        (lambda c: synk.all_reduce("count"), TypeError, "'count' is int64, .*use sum, max, min or prod$"),
        (lambda c: synk.all_reduce("a", "sum", by_rows=True), ValueError, "by_rows is for avg"),
        (lambda c: synk.all_reduce("nobody"), ValueError, "no function uses a shared variable 'nobody'"),
        (lambda c: synk.gather(pytensor.shared(1.0)), ValueError, "no function uses"),
        (lambda c: synk.all_reduce(["a", c["a"]]), ValueError, "given twice"),
        (lambda c: synk.broadcast("a", np.zeros(3)), TypeError, "'a' has 2 dimensions, the value has 1"),
        (lambda c: synk.broadcast("b", np.zeros(3)), TypeError, "'b' is float32"),
        (lambda c: synk.broadcast(["a", "b"], [np.zeros((2, 3))]), TypeError, "2 variables"),
        (lambda c: synk.scatter("b", np.zeros(3, "f4"), batch=4), ValueError, "there are 3 rows"),
        (lambda c: synk.set_value(9, "a", np.zeros((2, 3))), ValueError, "rank 9 does not exist"),
        (lambda c: synk.get_value(-1, "a"), ValueError, "rank -1 does not exist"),
        (lambda c: synk.get_value(1.0, "a"), TypeError, "rank 1.0 is not a whole number"),
        (lambda c: synk.gather("a", nd_up=2), ValueError, "nd_up=2"),
    ],
)
def test_what_is_refused_and_harmless(case: Any, ask: Any, error: type[Exception], words: str) -> None:
    values = fill(case, "a", (2, 3))
    with pytest.raises(error, match=words):
        ask(case)
    assert np.array_equal(synk.gather("a"), values)


@pytest.mark.parametrize("value", [1e-320, 1e308, np.inf, np.nan])
def test_reductions_do_not_follow_numpys_error_state(case: Any, value: float) -> None:
    with np.errstate(all="raise"):
        for n_slices in (1, 2):
            case["mean"](np.array([[value], [-value]] * 4), num_slices=n_slices)
        synk.broadcast(case["a"], np.full((2, 3), value))
        for op in FOLDS:
            synk.reduce(case["a"], op, in_place=False)
        synk.all_reduce(case["a"], "prod")
    assert np.isnan(synk.gather(case["a"])).all() == np.isnan(value)


def test_unequal_shapes_do_not_fold(case: Any) -> None:
    if case["size"] == 1:
        return
    synk.scatter("stored", np.zeros((4, 2)))
    for fold_them in (synk.reduce, synk.all_reduce):
        with pytest.raises(
            ValueError, match=r"'stored' has unequal shapes: \(1, 2\) on rank 0, \(1, 2\) on rank 1, \(2, 2\)"
        ):
            fold_them("stored")
    assert synk.get_lengths("stored") == [1, 1, 2]


def test_an_old_value_of_a_variable_is_no_part_of_its_memory(case: Any) -> None:
    """PyTensor does not copy it, neither for an output nor for the new value of another variable."""
    now, before = pytensor.shared(np.zeros(3), name="now"), pytensor.shared(np.zeros(3), name="before")
    one, two = pytensor.shared(np.ones(3), name="one"), pytensor.shared(np.full(3, 2.0), name="two")
    f = synk.function([], (now, None), updates=[(before, now[::-1]), (now, now + np.arange(3))])
    g = synk.function([], updates=[(one, two), (two, one)])
    synk.distribute()
    f()
    found = f()
    g()
    synk.all_reduce([now, one], "sum")
    synk.broadcast(two, np.full(3, 7.0))
    size = case["size"]
    assert found.tolist() == [0, 1, 2]
    assert synk.gather(before).tolist() == [[2, 1, 0]] * size
    assert synk.gather(now).tolist() == [[0, 2 * size, 4 * size]] * size
    assert synk.gather(one).tolist() == [[2 * size] * 3] * size
    assert f.alone().tolist() == [0, 2 * size, 4 * size]
    synk.broadcast(now, np.full(3, 9.0))
    assert before.get_value().tolist() == [4 * size, 2 * size, 0]
