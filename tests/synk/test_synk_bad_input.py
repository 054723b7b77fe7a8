"""Invalid arguments: the message names function, variable or rank, and the team remains usable."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from synk_teams import team

import lockstep.synk as synk


@pytest.fixture(scope="module")
def case() -> Iterator[Any]:
    with team(2):
        x, y = pt.matrix("x"), pt.vector("y")
        s = pytensor.shared(np.zeros((4, 2)), name="s")
        count = pytensor.shared(np.asarray(0), name="count")
        three, table = pt.tensor("three", shape=(None, 3)), pt.tensor("table", shape=(2, 3))
        pair = pytensor.shared(np.zeros(2), shape=(2,), name="pair")
        built = {
            "x": x,
            "y": y,
            "t": pt.scalar("t"),
            "s": s,
            "count": count,
            "f": synk.function([x, y], [(x.sum(0), "sum"), y.mean()], name="f"),
            "g": synk.function([], (s.sum(), "sum"), sliceable_shareds=[s], name="g"),
            "h": synk.function([], (count * 1, "max"), updates=[(count, count + 1)], name="h"),
            "equal": synk.function(
                [pt.vector("z"), pt.vector("z")], None, on_unused_input="ignore", name="equal"
            ),
            "both": synk.function([x], ((x + s).sum(), "sum"), sliceable_shareds=[s], name="both"),
            "three": synk.function([three], (three.sum(1), "gather"), name="three"),
            "table": synk.function([], (table.sum(1), "max"), bcast_inputs=[table], name="table"),
            "pair": pair,
            "pairs": synk.function([], (pair.sum(), "sum"), name="pairs"),
            "grown": synk.function([x], None, updates=[(pair, pair + x[0], "gather")], name="grown"),
        }
        synk.distribute()
        yield built


X, Y = np.ones((6, 2)), np.ones(6)

MAKING = [
    (
        lambda c: synk.function(c["x"], c["x"].sum()),
        TypeError,
        "inputs is TensorVariable, and has to be a list",
    ),
    (lambda c: synk.function((c["x"],), c["x"].sum()), TypeError, "inputs is tuple"),
    (lambda c: synk.function([3], c["x"].sum()), TypeError, r"3 is not .*A callable is the first argument"),
    (lambda c: synk.function([], bcast_inputs=c["x"]), TypeError, "bcast_inputs is"),
    (
        lambda c: synk.function([c["x"]], (c["x"].sum(), "sum", 1), name="n"),
        TypeError,
        "n: output 0 is a tuple of 3",
    ),
    (lambda c: synk.function([c["x"]], [(c["x"].sum(),)]), TypeError, "tuple of 1"),
    (
        lambda c: synk.function([c["x"]], (c["x"].sum(), "median")),
        ValueError,
        "output 0: unknown mode 'median'",
    ),
    (lambda c: synk.function([c["x"]], c["x"].argmax()), TypeError, r"int64.*or prod: \(variable, mode"),
    (
        lambda c: synk.function([c["x"]], (c["x"] > 0, "avg")),
        TypeError,
        "bool, which has no avg: cast it, or use max",
    ),
    (lambda c: synk.function([c["x"]], (c["x"] > 0, "sum")), TypeError, "bool, which has no sum"),
    (lambda c: synk.function([c["x"]], (c["x"] > 0, "prod")), TypeError, "bool, which has no prod"),
    (lambda c: synk.function([c["x"]], (c["x"].sum(), "gather")), TypeError, "a scalar, which has no rows"),
    (lambda c: synk.function([], updates=[(c["s"],)]), TypeError, "update 0: give"),
    (lambda c: synk.function([], updates=[(c["s"], c["s"], "sum", 1)]), TypeError, "update 0: give"),
    (lambda c: synk.function([], updates=[(c["x"], c["x"])]), TypeError, "not a shared variable"),
    (
        lambda c: synk.function([], updates=[(c["count"], 1.5)], name="f"),
        TypeError,
        "f: update 0: 1.5 can't replace count: ",
    ),
    (lambda c: synk.function([], givens={c["x"]: "a"}), TypeError, "givens: 'a' can't replace x: "),
    (lambda c: synk.function([], updates=[(c["s"], c["s"], "mean")]), ValueError, "unknown mode 'mean'"),
    (
        lambda c: synk.function([], updates=[(c["count"], c["count"] + 1, "avg")]),
        TypeError,
        "'count' is int64",
    ),
    (lambda c: synk.function([], givens=[(c["x"],)]), TypeError, "givens are pairs"),
    (lambda c: synk.function([], givens=3), TypeError, "givens is int: give a list of pairs, or a dict"),
    (lambda c: synk.function([], updates=3), TypeError, "updates is int: give a list of pairs, or a dict"),
    (lambda c: synk.function([c["x"], c["x"]], c["x"].sum()), ValueError, "input x is given twice"),
    (
        lambda c: synk.function([c["x"], c["t"]], c["x"] * c["t"], bcast_inputs=[c["t"]]),
        ValueError,
        "input t is given twice: bcast_inputs are not among inputs",
    ),
    (lambda c: synk.function([pt.vector("v", shape=(5,))]), TypeError, r"v has a fixed number of rows \(5\)"),
    (lambda c: synk.function([pt.row("r")]), TypeError, r"r has a fixed number of rows \(1\)"),
    (lambda c: synk.function([pt.scalar("t")]), TypeError, "t is a scalar.*bcast_inputs"),
    (lambda c: synk.function([pytensor.In(c["x"], mutable=True)], c["x"].sum()), TypeError, "x is mutable"),
    (
        lambda c: synk.function([pytensor.In(c["x"], name="rows")], c["x"].sum()),
        TypeError,
        "x is mutable, or has a name",
    ),
    (lambda c: synk.function([], c["s"].sum(), sliceable_shareds=c["s"]), TypeError, "has to be a list"),
    (lambda c: synk.function([], c["s"].sum(), sliceable_shareds=[c["x"]]), TypeError, "not a shared array"),
    (
        lambda c: synk.function([], c["s"].sum(), sliceable_shareds=[c["count"]]),
        TypeError,
        "'count' has no rows",
    ),
    (
        lambda c: synk.function([c["x"]], c["x"].sum(), sliceable_shareds=[c["s"]]),
        ValueError,
        "'s' is not used",
    ),
    (
        lambda c: synk.function([], c["s"].sum(), updates=[(c["s"], c["s"] + 1)], sliceable_shareds=[c["s"]]),
        ValueError,
        "'s' is updated by the function",
    ),
    (lambda c: synk.function([c["x"]], c["y"].sum(), name="n"), Exception, "y"),
]

CALLING = [
    (lambda c: c["f"](X), TypeError, "f takes 2 inputs, 1 given"),
    (lambda c: c["f"](X, Y, Y), TypeError, "f takes 2 inputs, 3 given"),
    (lambda c: c["f"](X, y=Y, x=X), TypeError, "two values for 'x'"),
    (lambda c: c["f"](X, z=Y), ValueError, "'z' is the name of no input"),
    (lambda c: c["f"](X, np.ma.masked_equal(Y, 1)), TypeError, "input y: values are masked"),
    (lambda c: synk.data(np.ma.masked_equal(X, 1), name="d"), TypeError, "data 'd': values are masked"),
    (lambda c: c["f"](X[0], Y), TypeError, "input x has 2 dimensions, 1 given"),
    (lambda c: c["f"](X, [1, [2]]), TypeError, "^f: input y: setting an array element with a sequence"),
    (lambda c: c["f"](X, None), TypeError, "^f: input y is NoneType: give Data or an array of num"),
    (lambda c: c["f"](X, "text"), TypeError, "^f: input y is str: give Data or an array of numbers"),
    (lambda c: c["f"](X.astype(complex), Y), TypeError, "input x is float64, and casting complex128"),
    (lambda c: c["f"](synk.data(X.astype("f4")), Y), TypeError, "is float64, the data 'data.*' is float32"),
    (lambda c: c["f"](synk.data(dtype=float, ndim=2), Y), ValueError, "no memory yet"),
    (
        lambda c: c["three"](np.ones((4, 5))),
        ValueError,
        r"three: input three has shape \(None, 3\), where None is any length; \(4, 5\) given",
    ),
    (lambda c: c["three"](synk.data(np.ones((4, 5)))), ValueError, r"\(None, 3\), .*; \(4, 5\) given"),
    (
        lambda c: c["table"](np.ones((3, 3))),
        ValueError,
        r"input table has shape \(2, 3\), .*; \(3, 3\) given",
    ),
    (lambda c: synk.broadcast(c["pair"], np.ones(3)), ValueError, r"'pair' has shape \(2,\), not \(3,\)"),
    (lambda c: c["grown"](X, num_slices=2), ValueError, r"'pair' has shape \(2,\), not \(4,\)"),
    (lambda c: c["f"](X[:0], Y[:0]), ValueError, "input x has no rows"),
    (lambda c: c["f"](X, Y[:5]), ValueError, "^f: input x has 6 rows, input y has 5 rows: without a batch"),
    (lambda c: c["equal"](Y, Y[:5]), ValueError, "^equal: input z has 6 rows, input z has 5 rows: without"),
    (lambda c: c["f"].build_inputs(X.astype(complex), Y), TypeError, "^f: input x is float64, and casting"),
    (lambda c: synk.data("text"), TypeError, r"^data\(\): <U4 is no type of numbers"),
    (lambda c: synk.data(dtype="f4"), TypeError, r"^data\(\): give a value"),
    (lambda c: synk.broadcast([c["s"], c["count"]], [X]), TypeError, "^s, count: 2 variables .* not 1$"),
    (lambda c: c["f"](X, Y, batch=7), ValueError, "there are 6 rows"),
    (lambda c: c["f"](X, Y, batch=[6]), ValueError, "row 6 goes past the end"),
    (lambda c: c["f"](X, Y[:5], batch=[5]), ValueError, "row 5 goes past the end"),
    (lambda c: c["f"](X, Y, batch=[]), ValueError, "f: the batch has no rows"),
    (lambda c: c["f"](X, Y, batch="all"), TypeError, "f: batch is str"),
    (
        lambda c: c["f"](X, synk.data(Y[:3], minibatch=True, name="m"), batch=4),
        ValueError,
        "minibatch 'm' has 3 rows",
    ),
    *(
        (
            lambda c, batch=batch: c["f"](*c["f"].build_inputs(X, Y, minibatch=True), batch=batch),
            TypeError,
            "f: batch chooses rows, and all inputs are minibatch Data",
        )
        for batch in (slice(3, None), [0, 1], Y > 0)
    ),
    (lambda c: c["f"](X, Y, num_slices=0), ValueError, "num_slices=0"),
    (lambda c: c["f"](X, Y, num_slices=1.5), ValueError, "num_slices=1.5"),
    (lambda c: c["f"](X, Y, num_slices=None), ValueError, "num_slices=None"),
    (lambda c: c["h"](num_slices=2), ValueError, "h: num_slices=2, but there is nothing to slice"),
    (lambda c: c["f"](X, Y, output_subset=[2]), ValueError, "output 2 does not exist"),
    (lambda c: c["f"](X, Y, output_subset=[-1]), ValueError, "output -1 does not exist"),
    (lambda c: c["f"](X, Y, output_subset=[True]), TypeError, "True is not an int"),
    (lambda c: c["f"](X, Y, output_subset=1), TypeError, "output_subset is int"),
    (lambda c: c["f"](X, Y, batch_s=slice(0, 1)), TypeError, "f: batch_s, but the function has no sliceable"),
    (lambda c: c["h"](batch=1), TypeError, "h: batch, but no input is divided"),
    (lambda c: c["g"](batch_s=3), TypeError, "g: batch_s is 3"),
    (lambda c: c["g"](batch_s=[0.5]), TypeError, "float64"),
    (lambda c: c["g"](batch_s=[[0]]), TypeError, "batch_s has 1 entries for 2 ranks"),
    (lambda c: c["g"](batch_s=[slice(1), slice(1), slice(1)]), TypeError, "3 entries for 2 ranks"),
    (lambda c: c["g"](batch_s=[[0], [4]]), ValueError, "g, rank 1: batch_s in 's': row 4 goes past the end"),
    (lambda c: c["g"](batch_s=[[9], [0]]), ValueError, "g, rank 0: batch_s in 's': row 9 goes past"),
    (lambda c: c["g"](batch_s=slice(0, 9)), ValueError, "g, rank 0: batch_s in 's'"),
    (lambda c: c["both"](X), ValueError, "both: rank 0 has unequal numbers of rows: 4 of s, 3 of its inputs"),
]


@pytest.mark.parametrize(("make", "error", "words"), MAKING)
def test_functions_that_make_no_sense_are_not_made(case: Any, make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make(case)
    synk.distribute()
    assert case["f"](X, Y)[1] == 1


@pytest.mark.parametrize(("call", "error", "words"), CALLING)
def test_calls_that_make_no_sense_leave_the_team_usable(case: Any, call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(case)
    assert case["f"](X, Y)[1] == 1
    assert case["g"]() == 0
    assert case["pairs"]() == 0
    assert case["three"](np.ones((4, 3))).tolist() == case["table"](np.ones((2, 3))).tolist() * 2 == [3] * 4


def test_an_integer_counter_is_fine_until_it_has_to_be_folded(case: Any) -> None:
    before = synk.get_value(1, "count")
    assert case["h"]() == before
    assert synk.get_value(1, "count") == before + 1
    x, count = case["x"], case["count"]
    f = synk.function([x], (x.sum(), "sum"), updates=[(count, count + 1)], name="counting")
    g = synk.function([x], (x.sum(), "sum"), updates=[(count, count + 1, "max")])
    synk.distribute()
    with pytest.raises(
        TypeError, match=r"counting: update of 'count' is int64, .* sum, max, min or prod as its mode"
    ):
        f(X, num_slices=2)
    g(X, num_slices=2)
    assert synk.get_value(1, "count") == before + 2


def test_no_row_numbers_in_the_first_call_with_any() -> None:
    with team(1):
        stored = pytensor.shared(np.ones(2), name="stored")
        f = synk.function([], (stored.sum(), "sum"), sliceable_shareds=[stored], name="f")
        synk.distribute()
        with pytest.raises(ValueError, match="f: no rank has rows"):
            f(batch_s=[])
        assert f(batch_s=[0]) == 1


def test_what_needs_a_team_says_so() -> None:
    synk.close()
    x = pt.vector("x")
    shared = pytensor.shared(np.zeros(2), name="v")
    for call in (lambda: synk.function([x], x.sum()), lambda: synk.data(np.ones(2)), synk.distribute):
        with pytest.raises(RuntimeError, match=r"call fork\(\) first"):
            call()
    with team(2):
        with pytest.raises(RuntimeError, match=r"a team already; close\(\) ends it"):
            synk.fork(2)
        f = synk.function([x], (x.sum() + shared.sum(), "sum"), name="f")
        for call in (lambda: f(np.ones(2)), lambda: synk.all_reduce(shared)):
            with pytest.raises(RuntimeError, match=r"call distribute\(\) first"):
                call()
        synk.distribute()
        later = pytensor.shared(np.zeros(2), name="later")
        synk.function([], later.sum())
        with pytest.raises(
            RuntimeError, match=r"'later' is not on the ranks yet|later is not on the ranks yet"
        ):
            synk.all_reduce("later")
        data = synk.data(np.ones(2))
    for call in (
        lambda: f(np.ones(2)),
        lambda: f.alone(np.ones(2)),
        lambda: data.set_length(90),
        lambda: data.set_value(np.ones(2)),
    ):
        with pytest.raises(RuntimeError, match=r"(function 'f'|data 'data.*') belongs to a closed team"):
            call()
    with pytest.raises(RuntimeError, match=r"call fork\(\) first"):
        synk.all_reduce(shared)
    synk.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_parallel": 0}, "number of ranks is 0"),
        ({"n_parallel": 10**12}, "number of ranks is 1000000000000"),
        *(
            ({"n_parallel": 2, name: value}, f"{name}={value!r} is not an integer")
            for name in ("n_parallel", "master_rank", "threads")
            for value in ("2", 2.0, True)
        ),
        ({"n_parallel": 2, "master_rank": 2}, "master_rank=2"),
        ({"n_parallel": 2, "timeout": 0}, "timeout=0"),
        ({"n_parallel": 2, "timeout": "a"}, "timeout=a is not a number of seconds"),
        ({"n_parallel": 2, "timeout": float("inf")}, "timeout=inf is not a number of seconds"),
        ({"n_parallel": 2, "timeout": float("nan")}, "timeout=nan"),
        ({"n_parallel": 2, "threads": 0}, "threads=0"),
        ({"n_parallel": 2, "threads": 100_000}, "threads=100000 is not from 1 to 1024"),
        ({"n_parallel": 2, "devices": ["cpu"]}, "1 devices for 2 ranks"),
        ({"use_gpu": True}, "use_gpu, but .*; without use_gpu and devices, ranks compute on CPUs$"),
        (
            {"devices": ["cuda:0", "cuda:1"]},
            "(cuda:0, cuda:1 can't be used|cuda:1 is not there).*; without use_gpu and devices, ranks",
        ),
        ({"devices": ["tpu"]}, "tpu"),
        ({"devices": "cuda:0"}, "devices='cuda:0' has to be a list of one device for each rank"),
        ({"devices": ["cpu", "cpu"], "use_gpu": True}, "use_gpu, but devices are CPUs: cpu, cpu. Leave one"),
        ({"devices": ["cuda:0", "cpu"]}, "ranks are on CPUs or on GPUs, not on both: cuda:0, cpu"),
    ],
)
def test_teams_that_make_no_sense(options: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synk.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on a machine without GPUs
    with pytest.raises(ValueError, match=words):
        synk.fork(**options)


def test_the_number_of_ranks_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    synk.close()
    monkeypatch.setenv("LOCKSTEP_SYNK_PARALLEL", "3")
    assert synk.fork(max_n_var=10, max_dim=4) == 3
    synk.close()
    monkeypatch.setenv("LOCKSTEP_SYNK_PARALLEL", "many")
    with pytest.raises(ValueError, match="LOCKSTEP_SYNK_PARALLEL='many'"):
        synk.fork()
