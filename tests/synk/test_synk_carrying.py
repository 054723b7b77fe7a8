"""Delivery of functions to the ranks: deep graphs, loops, random streams, later functions; whole programs."""

import functools
import importlib
import json
import operator
import os
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import cloudpickle
import numpy as np
import own_networks
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from limits import limit
from pytensor.tensor.random.utils import RandomStream
from synk_teams import MODE, largest_error, team

import lockstep.synk as synk
from lockstep.synk import graphs


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[int]:
    with team(3) as size:
        yield size


@pytest.mark.parametrize("n", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_graphs_of_any_depth_go_over(n: int) -> None:
    x = pt.vector("x")
    y = x
    for i in range(n):
        y = y * 1.0001 if i % 2 else y + 0.001
    f = synk.function([x], (y.sum(), "sum"), mode=pytensor.compile.mode.Mode("py", None))
    synk.distribute()
    assert largest_error(f(np.ones(30)), f.alone(np.ones(30))) < 1e-10


def test_a_graph_with_a_loop_in_it() -> None:
    x, s = pt.vector("x"), pytensor.shared(np.asarray(2.0), name="s")
    ys = pytensor.scan(lambda y: y * s, outputs_info=x, n_steps=5, return_updates=False)
    f = synk.function([x], (ys[-1], "gather"), name="loop")
    synk.distribute()
    assert np.array_equal(f(np.arange(7.0)), 32 * np.arange(7.0))


def test_givens_and_constants_and_names_go_over() -> None:
    x, y = pt.vector("x"), pt.vector("y")
    stored = pytensor.shared(np.arange(6.0), name="stored")
    table = pt.constant(np.arange(10_000.0))
    f = synk.function([x], ((x.sum() + y.sum() * table[7]), "sum"), givens={y: stored}, name="given")
    pair = synk.function([], (y.sum() * 1, "sum"), sliceable_shareds=[(y, stored)])
    synk.distribute()
    assert f(x=np.ones(5)) == 5 + 3 * 15 * 7
    assert pair(batch_s=[2, 3]) == 3 * 5
    assert f.name == "given" and f.output_modes == ["sum"]


@pytest.mark.slow
def test_a_callable_reads_the_variable_of_a_graph_that_was_created_after_it() -> None:
    x, total = pt.vector("x"), pytensor.shared(np.zeros(2), name="total")
    read = synk.function(lambda: torch.as_tensor(total.get_value()), "gather")
    add = synk.function([x], [], updates=[(total, total + x.sum())])
    synk.distribute()
    add(np.ones(6))
    assert read().tolist() == [2.0] * 6
    synk.set_value(2, total, np.array([7.0, 8.0]))
    assert read().tolist() == [2.0] * 4 + [7.0, 8.0]


def test_numbers_and_arrays_replace_variables() -> None:
    x, y = pt.vector("x"), pt.vector("y")
    count = pytensor.shared(np.asarray(3), name="count")
    f = synk.function([x], (x.sum() + y[0], "max"), givens={y: np.full(2, 7.0)}, updates=[(count, 0)])
    synk.distribute()
    assert f(np.ones(6)) == 2 + 7
    assert synk.gather(count).tolist() == [0, 0, 0]


def test_a_callable_may_name_modules_of_a_class_of_their_own() -> None:
    def deterministic(x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(deterministic=True):
            return x + torch.backends.cudnn.deterministic

    f = synk.function(deterministic, "gather")
    synk.distribute()
    assert f(np.zeros(3)).tolist() == [1, 1, 1]


def test_later_functions_share_variables_with_older_ones() -> None:
    s = pytensor.shared(np.zeros(2), name="shared")
    count = synk.function([], updates=[(s, s + 1)])
    synk.distribute()
    count()
    read = synk.function([], (s, "sum"))
    synk.distribute()
    count()
    assert read().tolist() == [6, 6]
    assert read.update_modes == [] and count.update_modes == ["avg"]


def test_random_streams_are_each_ranks_own_and_go_on_over_slices() -> None:
    rng = pytensor.shared(np.random.default_rng(5), name="rng")
    state = rng.get_value()
    next_rng, draw = pt.random.normal(size=(2,), rng=rng).owner.outputs
    x = pt.vector("x")
    f = synk.function([x], [(draw, "gather")], updates=[(rng, next_rng)], on_unused_input="ignore")
    synk.distribute()
    first = f(np.ones(3))[0].reshape(3, 2)
    assert len(np.unique(first)) == 6, "no two ranks draw the same"
    sliced = f(np.ones(6), num_slices=2)[0].reshape(3, 4)
    assert len(np.unique([first, sliced[:, :2], sliced[:, 2:]])) == 18, "nor two parts, nor two calls"
    for rank in range(3):
        own = graphs.own_stream(state if rank == 0 else np.random.default_rng(5), rank)
        expected = [own.normal(size=2) for _ in range(3)]
        assert np.allclose(first[rank], expected[0]) and np.allclose(
            sliced[rank], np.concatenate(expected[1:])
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_functions_of_two_calls_share_a_random_stream_whose_default_update_has_inputs() -> None:
    x, n = pt.vector("x"), pytensor.shared(0, name="n")
    drawn = RandomStream(5).uniform(size=x.shape)
    n.default_update = n + 1
    first = synk.function([x], (drawn + 0 * x, "gather"))
    count = synk.function([x], (n + 0 * x, "max"))
    synk.distribute()
    second = synk.function([x], (drawn + 0 * x, "gather"))
    n.default_update = n + 10
    count_more = synk.function([x], (n + 0 * x, "max"))
    synk.distribute()
    rows = np.ones(6)
    assert len({*first(rows), *second(rows), *first(rows)}) == 18
    count(rows), count_more(rows)
    assert synk.gather(n).tolist() == [11, 11, 11]


def test_one_graph_is_compiled_for_all_ways_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = pytensor.function
    monkeypatch.setattr(
        pytensor, "function", lambda *a, **k: compiled.append(k["name"]) or compile_one(*a, **k)
    )
    x, s, v = pt.matrix("x"), pytensor.shared(np.zeros((6, 2))), pytensor.shared(np.zeros(2))
    f = synk.function(
        [x],
        [(x.sum(0) + s.sum(0), "sum"), x.mean()],
        updates=[(v, v + x.sum(0))],
        sliceable_shareds=[s],
        name="one",
    )
    synk.distribute()
    for options in ({}, {"num_slices": 3}, {"batch": [1, 2, 5]}, {"output_subset": [1]}):
        values = np.ones((18, 2))
        f(values, batch_s=[0] if "batch" in options else None, **options)
    f.alone(np.ones((6, 2)))
    assert compiled == ["one"]


def test_an_attribute_of_a_methods_object_that_can_not_go_over_is_named() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.rate = 0.1
            self.step = synk.function(self.compute, "sum", name="step")

        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * self.rate

    trainer = Trainer()
    with pytest.raises(
        TypeError, match=r"^function 'step': 'self\.step', which it uses, can't go to the ranks: .* callable$"
    ):
        synk.distribute()
    del trainer.step
    step = synk.function(trainer.compute, "sum")
    synk.distribute()
    assert abs(step(np.ones(5)) - 0.5) < 1e-12


def test_a_graph_that_can_not_go_over_is_named() -> None:
    x = pt.vector("x")

    f = synk.function([x], (x.sum(), "sum"), name="good")
    x.tag.lock = threading.Lock()
    synk.function([x], (x.max(), "max"), name="locked")
    with pytest.raises(TypeError, match=r"function 'good'.* can't go to the ranks: .*lock"):
        synk.distribute()
    del x.tag.lock
    synk.distribute()
    with pytest.raises(RuntimeError, match="good: call distribute"):
        f(np.ones(3))


@pytest.mark.parametrize("is_imported", [True, False], ids=["imported", "own"])
def test_a_network_of_an_imported_module_goes_over_or_is_refused(is_imported: bool) -> None:
    """Each rank would import the module, and compute with a network that is not shared."""
    net = synk.share(own_networks.net)
    function = own_networks.compute if is_imported else lambda x: own_networks.net(x.float())
    synk.function(function, "gather")
    with pytest.raises(TypeError, match=r"uses own_networks\.nets?, .*_by_value\(own_networks\) before"):
        synk.distribute()
    cloudpickle.register_pickle_by_value(own_networks)
    f = synk.function(function, "gather")
    synk.distribute()
    cloudpickle.unregister_pickle_by_value(own_networks)
    values = np.ones((6, 2), "float32")
    assert f(values).tolist() == net(torch.from_numpy(values)).tolist()


def test_a_network_of_an_imported_class_goes_over() -> None:
    """Its attribute `net` is not the global of that name."""
    net = synk.share(own_networks.Doubling())
    f = synk.function(net, "gather")
    synk.distribute()
    values = np.ones((6, 2), "float32")
    assert f(values).tolist() == net(torch.from_numpy(values)).tolist()


PAPER = """
    import {theano} as theano, numpy as np, sys
    {synk}
    T = theano.tensor

    def build_mlp():
        x = T.matrix("x")
        random, shapes = np.random.default_rng(0), [(8, 16), (16, 3)]
        params = [theano.shared(random.normal(0, 0.3, shape), name="w") for shape in shapes]
        return T.tanh(x.dot(params[0])).dot(params[1]), x, params

    def setup_training(network):
        y = T.matrix("y")
        loss = ((network - y) ** 2).mean()
        return [(p, p - 0.1 * g) for p, g in zip(params, T.grad(loss, params))], y

    network, input_var, params = build_mlp()
    updates, target_var = setup_training(network)
    train_fn = {function}(inputs=[input_var, target_var], updates=updates)
    {distribute}
    random = np.random.default_rng(1)
    X, Y = random.normal(size=(60, 8)), random.normal(size=(60, 3))
    {data}
    for epoch in range(3):
        order = random.permutation(60)
        for first in range(0, 60, 20):
            batch = order[first:first + 20]
            {train}
    np.save(sys.argv[1], np.concatenate([p.get_value().ravel() for p in params]))
"""


def test_the_papers_program_is_its_serial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures 4 and 5 of Stooke and Abbeel 2017; SGD on averaged parameters is SGD on the whole batch."""
    serial = {
        "synk": "",
        "function": "theano.function",
        "distribute": "",
        "data": "",
        "train": "train_fn(X[batch], Y[batch])",
    }
    ours = {
        "synk": "import lockstep.synk as synk; synk.fork(2)",
        "function": "synk.function",
        "distribute": "synk.distribute()",
        "data": "X, Y = synk.data(X), synk.data(Y)",
        "train": "train_fn(X, Y, batch=batch); synk.all_reduce(params, op='avg')",
    }
    saved = {name: tmp_path / f"{name}.npy" for name in ("serial", "ours")}
    monkeypatch.setattr(sys, "argv", ["serial.py", str(saved["serial"])])
    exec(textwrap.dedent(PAPER).format(theano="pytensor", **serial), {})
    script = tmp_path / "ours.py"
    script.write_text(textwrap.dedent(PAPER).format(theano="pytensor", **ours))
    environment = {**os.environ, "PYTENSOR_FLAGS": f"mode={MODE}"}
    command = [sys.executable, script, saved["ours"]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(100), env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert largest_error(np.load(saved["ours"]), np.load(saved["serial"])) < 1e-10


def test_the_guides_first_example_runs(tmp_path: Path) -> None:
    """The example is that of docs/synk.md, with two ranks."""
    text = (Path(__file__).parents[2] / "docs" / "synk.md").read_text()
    example = textwrap.dedent(text[text.index("    import numpy") : text.index("A script needs no")])
    script = tmp_path / "example.py"
    script.write_text(example + "print(mean.shape, each.shape, np.allclose(each.mean(), mean))")
    environment = {**os.environ, "PYTENSOR_FLAGS": f"mode={MODE}", "LOCKSTEP_SYNK_PARALLEL": "2"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=limit(100), env=environment
    )
    assert done.stdout == "() (60000,) True\n", done.stderr


WEIGHTED = """
import copy, numpy as np, torch, lockstep.synk as synk
synk.fork(3)
torch.manual_seed(0)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(20, 4)).astype("f4"), rng.integers(0, 3, 20)
y[::4] = -100
net = synk.share(torch.nn.Linear(4, 3))
net.bias.requires_grad_(False)
one = copy.deepcopy(net)
optimizer, rule = (torch.optim.SGD(n.parameters(), lr=0.5, momentum=0.9) for n in (net, one))
x_data, y_data = synk.data(x), synk.data(y)
{functions}
for batch in (slice(0, 20), [1], [3, 2], [7]):  # ranks without rows
    compute.alone(x, y)
{call}
    rule.zero_grad()
    expected = torch.nn.functional.cross_entropy(one(torch.tensor(x[batch])), torch.tensor(y[batch]))
    expected.backward()
    rule.step()
    torch.testing.assert_close(torch.tensor(loss / divisor, dtype=torch.float32), expected.detach())
    torch.testing.assert_close(net.weight.detach(), one.weight.detach())
print("equal")
"""


@pytest.mark.slow
def test_the_guides_weighted_loss_is_that_of_one_process(tmp_path: Path) -> None:
    """Batches of one row follow calls that left gradients on ranks that have no rows now."""
    text = (Path(__file__).parents[2] / "docs" / "synk.md").read_text()
    _, rest = text.split("both per row, and divide after the reduction:\n")
    functions, rest = rest.split("    loss, divisor =")
    call = "    loss, divisor =" + rest[: rest.index("\n\n")]
    script = tmp_path / "weighted.py"
    script.write_text(WEIGHTED.format(functions=textwrap.dedent(functions), call=call))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=limit(100))
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_compiled_by_numba() -> None:
    """One of each kind: modes, slices, index lists, stored rows, updates."""
    x, s = pt.matrix("x"), pytensor.shared(np.zeros((9, 3)), name="numbas")
    total = pytensor.shared(np.zeros(3), name="total")
    rows = pt.tanh(x)
    outputs = [(rows.sum(0), "sum"), rows.mean(0), (rows.max(0), "max"), (rows, "gather")]
    f = synk.function([x], outputs, updates=[(total, total + rows.sum(0), "sum")], mode="NUMBA")
    g = synk.function([], (pt.tanh(s).sum(0), "sum"), sliceable_shareds=[s], mode="NUMBA")
    synk.distribute()
    values = np.random.default_rng(0).normal(size=(50, 3))
    expected = np.tanh(values)
    for batch, chosen in (
        (None, expected),
        (slice(3, 40), expected[3:40]),
        ([5, 1, 30], expected[[5, 1, 30]]),
    ):
        for n_slices in (1, 3):
            found = f(values, batch=batch, num_slices=n_slices)
            folds = [chosen.sum(0), chosen.mean(0), chosen.max(0), chosen]
            assert all(largest_error(a, b) < 1e-10 for a, b in zip(found, folds, strict=True))
    assert np.abs(synk.reduce(total, "sum", in_place=False)).sum() > 0
    synk.scatter(s, values)
    assert largest_error(g(), expected.sum(0)) < 1e-10
    with pytest.raises(Exception, match=r"rank|index|dim|shape|incompatible"):
        f(np.ones((5, 2)))
    assert largest_error(g(num_slices=2), expected.sum(0)) < 1e-10


def test_a_variable_of_a_closure_may_have_no_value_yet() -> None:
    def needs_later(x: torch.Tensor) -> torch.Tensor:
        return later(x) if len(x) > 9 else x

    f = synk.function(needs_later, "gather")
    synk.distribute()
    assert f(np.ones(4)).tolist() == [1] * 4

    def later(x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_graph_is_compiled_with_the_settings_of_its_creation() -> None:
    x, unused = pt.vector("x"), pt.vector("unused")
    with pytensor.config.change_flags(on_unused_input="ignore"):
        f = synk.function([x, unused], (x.sum(), "sum"))
    synk.distribute()
    assert f(np.ones(4), np.ones(4)) == 4


def test_workers_import_what_the_program_finds_after_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_later.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    f = synk.function(importlib.import_module("found_later").double, "gather")
    synk.distribute()
    assert f(np.ones(3)).tolist() == [2] * 3


@pytest.mark.slow
def test_each_rank_has_its_own_copy_of_an_array_in_a_closure() -> None:
    with team(4):
        seen = np.zeros(3)

        def count(x: torch.Tensor) -> torch.Tensor:
            seen[:] += len(x)
            return torch.from_numpy(seen.copy())

        f = synk.function(count, "gather")
        synk.distribute()
        f(np.ones(8))
        assert f(np.ones(8)).tolist() == [4.0] * 12


@pytest.mark.slow
def test_functions_share_a_variable_that_one_of_them_binds() -> None:
    n_calls = 0

    def count(x: torch.Tensor) -> None:
        nonlocal n_calls
        n_calls += 1

    def read(x: torch.Tensor) -> torch.Tensor:
        return x + n_calls

    def factorial(x: torch.Tensor) -> torch.Tensor:
        return x * factorial(x - 1) if x[0] > 1 else x

    with team(3):
        functions = [synk.function(count), *(synk.function(f, "gather") for f in (read, factorial))]
        synk.distribute()
        functions[0](np.ones(3))
        functions[0](np.ones(3))
        assert functions[1](np.zeros(3)).tolist() == [2.0] * 3
        assert functions[2](np.full(3, 4.0)).tolist() == [24.0] * 3


@pytest.mark.slow
def test_a_result_with_gradients_cannot_go_to_the_ranks() -> None:
    """On other ranks its gradients would not reach the weights."""
    with team(3):
        net = synk.share(torch.nn.Linear(2, 2))
        doubled = net.weight + net.weight

        def compute(x: torch.Tensor) -> None:
            (doubled * x.sum()).sum().backward()

        synk.function(compute, None, updates=[synk.grads(net)])
        with pytest.raises(TypeError, match="'doubled' is the result of an operation with gradients"):
            synk.distribute()
        doubled = doubled.detach()
        total = synk.function(lambda x: x.sum() + 0 * doubled.sum(), "sum")
        synk.distribute()
        assert total(np.ones(6)) == 6


@pytest.mark.slow
def test_a_module_that_was_reloaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edited.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with team(2):
        module = importlib.import_module("edited")
        for _ in range(2):
            f = synk.function(module.double, "gather")
            synk.distribute()
            assert f(np.ones(3)).tolist() == [2] * 3
        by_module = synk.function(lambda x: module.double(x) + 0, "gather", name="by_module")
        synk.distribute()
        importlib.reload(module)
        for function in (module.double, lambda x: module.double(x) + 0):
            synk.function(function, "gather")
            with pytest.raises(TypeError, match="edited was reloaded"):
                synk.distribute()
        with pytest.raises(RuntimeError, match="by_module: edited was reloaded after this function was"):
            by_module(np.ones(3))
        cloudpickle.register_pickle_by_value(module)
        f = synk.function(module.double, "gather")
        synk.distribute()
        cloudpickle.unregister_pickle_by_value(module)
        assert f(np.ones(3)).tolist() == [2] * 3


@pytest.mark.slow
def test_a_library_may_be_reloaded() -> None:
    """It is the same code again. Notebooks reload logging, for instance, to configure it."""
    with team(2):
        for _ in range(2):
            f = synk.function(lambda x: x * json.loads("3"), "gather")
            synk.distribute()
            importlib.reload(json)
            assert f(np.ones(3)).tolist() == [3] * 3


@pytest.mark.slow
def test_a_module_that_is_reloaded_after_a_callable_named_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have its former version, though no function of it went to them by itself."""
    for name, imported in (("within", ""), ("above", "import within\n"), ("imported_late", "")):
        text = "def double(x):\n    return 2 * x\n"
        (tmp_path / f"{name}.py").write_text(imported + text + "def twice(x):\n    return within.double(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    above, late = importlib.import_module("above"), importlib.import_module("imported_late")

    def import_late(x: torch.Tensor) -> torch.Tensor:
        import imported_late

        return cast(torch.Tensor, imported_late.double(x))

    with team(2):
        f = synk.function(lambda x: above.double(x) + 0, "gather")
        synk.distribute()
        synk.function(import_late, "gather")
        synk.distribute()
        for module in (above.within, late):
            importlib.reload(module)
        assert f(np.ones(3)).tolist() == [2] * 3, "it does not use these"
        for function, name in ((above.twice, "within"), (import_late, "imported_late")):
            synk.function(function, "gather")
            with pytest.raises(TypeError, match=f"{name} was reloaded"):
                synk.distribute()


@pytest.mark.slow
def test_a_program_may_change_its_directory_and_cache_results(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/own_module.py").write_text("def double(x):\n    return 2 * x\n")
    program = """
    import functools, os
    import numpy as np
    import lockstep.synk as synk

    @functools.lru_cache(maxsize=3)
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    class Scale:
        @functools.cached_property
        def factor(self):
            return factorial(3)

    scale = Scale()
    synk.fork(2)
    os.chdir("inside")
    import own_module
    f = synk.function(lambda x: own_module.double(x) * scale.factor, "gather")
    synk.distribute()
    print(f(np.ones(4)).tolist())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == "[12.0, 12.0, 12.0, 12.0]\n", done.stderr


@pytest.mark.slow
def test_imported_modules_read_the_programs_arguments_on_all_ranks(tmp_path: Path) -> None:
    module = """
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--factor", type=float, default=2.0)
    options = parser.parse_args()

    def scale(x):
        return options.factor * x
    """
    program = """
    import numpy as np
    import lockstep.synk as synk
    from own_options import scale

    synk.fork(2)
    f = synk.function(scale, "gather")
    synk.distribute()
    print(f(np.ones(4)).tolist())
    """
    (tmp_path / "own_options.py").write_text(textwrap.dedent(module))
    command = [sys.executable, "-c", textwrap.dedent(program), "digits", "--factor", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == "[3.0, 3.0, 3.0, 3.0]\n", done.stderr


@pytest.mark.slow
def test_a_module_that_starts_a_team_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    module = """
    import lockstep.synk as synk

    synk.fork(2)
    def double(x):
        return 2 * x
    f = synk.function(double, "gather")
    synk.distribute()
    """
    (tmp_path / "own_team.py").write_text(textwrap.dedent(module))
    command = [sys.executable, "-c", "import own_team"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert "RuntimeError: fork(): this process is a rank already" in done.stderr, done.stderr


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_functions_of_the_program_go_to_the_ranks_of_its_spawned_child(tmp_path: Path, method: str) -> None:
    program = f"""
    import functools, multiprocessing, runpy, sys
    import numpy as np
    import lockstep.synk as synk

    class Factor:
        value = 3

    @functools.lru_cache
    def factor():
        return Factor().value

    def scale(x):
        return factor() * x

    def compute():
        synk.fork(2)
        f = synk.function(scale, "gather")
        synk.distribute()
        print(f(np.ones(4)).tolist(), flush=True)
        synk.close()

    if __name__ == "__main__":
        child = multiprocessing.get_context("{method}").Process(target=compute)
        child.start()
        child.join()
        runpy.run_path(sys.argv[0])
    if __name__ == "<run_path>":
        compute()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(120))
    assert done.stdout == "[3.0, 3.0, 3.0, 3.0]\n" * 2, done.stderr


@pytest.mark.slow
def test_a_program_may_have_no_standard_output(tmp_path: Path) -> None:
    result = tmp_path / "result"
    program = f"""
    import numpy as np
    import lockstep.synk as synk

    def double(x):
        print("a line that no stream takes", flush=True)
        return 2 * x

    synk.fork(2)
    f = synk.function(double, "gather")
    synk.distribute()
    with open({str(result)!r}, "w") as file:
        file.write(str(f(np.ones(4)).tolist()))
    """
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit(60), check=True)
    assert result.read_text() == "[2.0, 2.0, 2.0, 2.0]"
    assert not done.stderr


@pytest.mark.parametrize("arguments", [["-m", "IPython", "--simple-prompt"], ["-i"]])
@pytest.mark.slow
def test_an_interactive_session_that_displayed_a_network_distributes_it(
    tmp_path: Path, arguments: list[str]
) -> None:
    """The interpreter's builtins refer to the shell, and to what was displayed last."""
    if "IPython" in arguments:
        pytest.importorskip("IPython")
    program = """\
    import numpy as np, torch, lockstep.synk as synk
    synk.fork(2)
    net = synk.share(torch.nn.Linear(2, 1))
    net
    f = synk.function(lambda x: torch.ones(1) + 0 * net(x).sum(), "sum")
    synk.distribute()
    print("result:", f(np.ones((4, 2), np.float32)))
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        input=textwrap.dedent(program),
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    assert "result: [2.]" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_cached_functions_that_no_module_has_go_over() -> None:
    @functools.lru_cache
    def double(number: float) -> float:
        return 2 * number

    triple = functools.lru_cache(functools.partial(operator.mul, 3.0))
    with team(2):
        f = synk.function(lambda x: x.sum() * double(1.0) * triple(1.0), "sum")
        synk.distribute()
        assert f(np.ones(4)) == 24


@pytest.mark.slow
def test_an_assert_that_pytest_rewrote_is_no_state_of_an_imported_module() -> None:
    """_pytest refers to the test modules, and this one imports own_networks, which has a network."""

    def checked(x: torch.Tensor) -> torch.Tensor:
        assert all(row >= 0 for row in x), "an assert with a call"
        return x.sum()

    with team(2):
        f = synk.function(checked, "sum")
        synk.distribute()
        assert f(np.ones(4)) == 4


@pytest.mark.slow
def test_each_stream_of_a_rank_is_a_function_of_the_callers_stream() -> None:
    def draw() -> torch.Tensor:
        return torch.tensor([[torch.rand(()), np.random.rand(), random.random()]])

    drawn = []
    for seed in (1, 2):
        torch.manual_seed(0)
        np.random.seed(seed)
        random.seed(seed)
        with team(2):
            f = synk.function(draw, "gather")
            synk.distribute()
            drawn.append(f())
            torch.manual_seed(0)
            assert (f()[:, 0] == drawn[-1][:, 0]).tolist() == [True, False], "seeds reach this process only"
    assert (drawn[0] == drawn[1]).tolist() == [[True, False, False]] * 2


@pytest.mark.slow
def test_a_module_that_seeds_when_it_is_imported_leaves_ranks_their_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = """
    import random
    import numpy as np
    import torch

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    def draw(x):
        return torch.tensor([[random.random(), np.random.rand(), torch.rand(()).item()] for _ in x])
    """
    monkeypatch.syspath_prepend(tmp_path)
    with team(3):
        functions = []
        for name in ("seeding", "seeding_later"):
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(module))
            functions.append(synk.function(importlib.import_module(name).draw, "gather"))
            synk.distribute()
            drawn = functions[0](np.ones(6))
            assert len(np.unique(drawn)) == 18


@pytest.mark.slow
def test_workers_of_a_program_without_asserts_have_none() -> None:
    program = """
    import lockstep.synk as synk
    from pathlib import Path

    synk.fork(2)
    (worker,) = synk.session.current_team("a test").workers
    print("-O" in Path(f"/proc/{worker.process.pid}/cmdline").read_text().split("\\0"))
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("own", [{}, {"__name__": "nowhere"}], ids=["no_module", "unknown_module"])
@pytest.mark.slow
def test_a_callable_may_use_a_function_that_exec_made(own: dict[str, object]) -> None:
    """No module has the name of its `__module__`, which may be None."""
    exec("def double(x): return 2 * x", own)
    double = cast(Callable[[torch.Tensor], torch.Tensor], own["double"])
    with team(2):
        f, g = synk.function(lambda x: double(x) + 1, "gather"), synk.function(double, "gather")
        synk.distribute()
        assert (f(np.ones(4)) - 1).tolist() == g(np.ones(4)).tolist() == [2] * 4
        later = synk.function(lambda x: x.sum(), "sum")
        synk.distribute()
        assert later(np.ones(4)) == 4


@pytest.mark.slow
def test_an_imported_module_may_hold_a_dead_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no `__class__`: isinstance() of it raises ReferenceError."""
    (tmp_path / "with_a_proxy.py").write_text(textwrap.dedent(PROXY))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("with_a_proxy")
    doubling = module.Doubling()
    with team(2):
        f = synk.function(lambda x: doubling(x) if module.dead is not None else x, "gather")
        synk.distribute()
        assert f(np.ones(4)).tolist() == [2] * 4


@pytest.mark.slow
def test_a_dead_proxy_in_a_callable_is_refused_once() -> None:
    """It raises ReferenceError wherever it is asked for its class."""
    dead = weakref.proxy(set())
    with team(2):
        synk.function(lambda x: x if dead is None else 2 * x, "gather", name="with_proxy")
        with pytest.raises(TypeError, match="'with_proxy': 'dead', which it uses, can't go to the ranks"):
            synk.distribute()
        f = synk.function(lambda x: x.sum(), "sum")
        synk.distribute()
        assert f(np.ones(4)) == 4


PROXY = """
    import weakref

    dead = weakref.proxy(set())

    class Doubling:
        def __call__(self, x):
            return 2 * x if dead is not None else x
"""
