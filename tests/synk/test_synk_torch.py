"""Functions that are torch callables: the same engine, on tensors that all ranks share.

With $LOCKSTEP_TEST_DEVICES ranks are on these: tests/synk/test_synk_gpu.py runs this file on simulated GPUs.
"""

import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from synk_teams import DEVICES, largest_error, team

import lockstep.synk as synk
from lockstep.errors import UserError
from lockstep.synk.extensions import torch_train

SIZES: list[Any] = [len(DEVICES)] if DEVICES else [2, pytest.param(3, marks=pytest.mark.slow)]
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(1)
    with team(request.param, devices=DEVICES or None, master_rank=request.param // 3) as size:
        yield size


@pytest.fixture(params=list(BOUNDS))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_net(seed: int = 0, dtype: str = "float64") -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    return torch.nn.Sequential(*layers).to(getattr(torch, dtype))


def test_training_is_that_of_one_process(ranks: int, dtype: str) -> None:
    net, lone = synk.share(make_net(dtype=dtype)), make_net(dtype=dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = torch.nn.functional.mse_loss

    def gradient(x, y):
        optimizer.zero_grad()
        found = loss(net(x), y)
        found.backward()
        return found

    def update():
        optimizer.step()

    f = synk.function(gradient, "avg", updates=[synk.grads(net)])
    step = synk.function(update, None, updates=[synk.weights(net)])
    synk.distribute()
    reference = torch.optim.SGD(lone.parameters(), lr=0.1, momentum=0.9)
    random = np.random.default_rng(2)
    x, y = random.normal(size=(40, 4)).astype(dtype), random.normal(size=(40, 2)).astype(dtype)
    for number in range(10):
        batch = random.integers(0, 40, random.integers(1, 20))
        found = f(x, y, batch=batch, num_slices=1 + number % 3)
        synk.all_reduce(synk.grads(net), by_rows=True)
        step()
        reference.zero_grad()
        expected = loss(lone(torch.from_numpy(x[batch])), torch.from_numpy(y[batch]))
        expected.backward()
        reference.step()
        assert abs(found - expected.item()) < BOUNDS[dtype] * max(1, expected.item())
    if DEVICES and dtype == "float32":
        gradients = synk.session.current_team("").registry.find(synk.grads(net), "")[0]
        assert type(gradients.storage._transport).__name__ == os.environ["LOCKSTEP_TEST_TRANSPORT"]
    weights = synk.gather(synk.weights(net))
    assert all(np.array_equal(value, weights[0]) for value in weights), "replicas are bitwise equal"
    flat = np.concatenate([param.detach().numpy().ravel() for param in lone.parameters()])
    assert largest_error(weights[0], flat) < BOUNDS[dtype]


def test_a_training_step_of_one_command(ranks: int, dtype: str) -> None:
    net, lone, loss = make_net(dtype=dtype), make_net(dtype=dtype), torch.nn.functional.mse_loss
    step = torch_train.make_train_function(net, loss, torch.optim.Adam(net.parameters(), lr=0.01))
    synk.distribute()
    reference = torch.optim.Adam(lone.parameters(), lr=0.01)
    random = np.random.default_rng(4)
    x, y = random.normal(size=(30, 4)).astype(dtype), random.normal(size=(30, 2)).astype(dtype)
    for number in range(8):
        batch = random.integers(0, 30, random.integers(1, 20))
        found = step(x, y, batch=batch, num_slices=1 + number % 2)
        reference.zero_grad()
        expected = loss(lone(torch.from_numpy(x[batch])), torch.from_numpy(y[batch]))
        expected.backward()
        reference.step()
        assert abs(found - expected.item()) < 10 * BOUNDS[dtype] * max(1, expected.item())
    weights = synk.gather(synk.weights(net))
    assert all(np.array_equal(value, weights[0]) for value in weights), "replicas are bitwise equal"


def test_every_mode_is_exact_for_any_rows_and_slices(ranks: int, dtype: str) -> None:
    def compute(x, y, weight):
        rows = torch.tanh(x) * weight + y[:, None]
        return rows.mean(0), rows.sum(0), rows.amax(0), rows.amin(0), rows.prod(0), rows, rows.sum().item()

    modes = ["avg", "sum", "c_max", "min", "prod", "gather", None]
    f = synk.function(compute, modes, bcast_inputs=["weight"])
    synk.distribute()
    random, bound = np.random.default_rng(1), BOUNDS[dtype]
    weight = np.asarray(1.5, dtype)
    for n_rows in (1, 2, 7, 29):
        x, y = random.uniform(0.5, 1.5, (n_rows, 3)), random.uniform(-0.1, 0.1, n_rows)
        x, y = x.astype(dtype), y.astype(dtype)
        rows = np.tanh(x) * weight + y[:, None]
        folds = [rows.mean(0), rows.sum(0), rows.max(0), rows.min(0), rows.prod(0), rows]
        for n_slices in (1, 2, 5):
            found = f(x, y, weight=weight, num_slices=n_slices)
            for value, expected in zip(found[:6], folds, strict=True):
                assert value.dtype == dtype and largest_error(value, expected) < bound
        batch = random.integers(0, n_rows, 5)
        assert largest_error(f(x, y, weight, batch=batch, output_subset=[1])[0], rows[batch].sum(0)) < bound
        assert largest_error(f.alone(x, y, weight)[1], rows.sum(0)) < bound


def test_parts_of_several_dtypes_and_shapes(ranks: int) -> None:
    def total(x):
        positive = x[x > 0]
        return positive.sum() if len(positive) else 0

    def rows_or_nothing(x):
        positive = x[x[:, 0] > 0]
        return positive if len(positive) else torch.empty(0, device=x.device)

    f, g = synk.function(total, "sum"), synk.function(rows_or_nothing, "gather", name="g")
    synk.distribute()
    x = np.arange(-4.0, 5).reshape(9, 1) + 0.5
    for data in (x, -x):  # the first rank has no positive rows, or the last
        for n_slices in (1, 3):
            assert f(data, num_slices=n_slices) == data[data > 0].sum()
    with pytest.raises(ValueError, match=r"g: output 0 has parts of the shapes \(0,\), \(\d, 1\)"):
        g(x)


def test_an_empty_part_leaves_the_dtype_of_the_others(ranks: int) -> None:
    def positive(x):
        return torch.tensor([int(number) for number in x if number > 0], device=x.device)  # float32 if empty

    f = synk.function(positive, "gather")
    synk.distribute()
    x = np.arange(-4, 5)
    for data in (x, -x, 2**60 + x, -abs(x)):
        for n_slices in (1, 3):
            found, expected = f(data, num_slices=n_slices), data[data > 0]
            assert found.dtype == (expected.dtype if len(expected) else np.float32)
            assert np.array_equal(found, expected)


def test_large_outputs_fold_where_they_are(ranks: int) -> None:
    """On GPUs those of a megabyte and more stay there until they are folded."""
    size = 300_000
    f = synk.function(
        lambda x: [n * x[:, :1] * torch.ones(size, device=x.device) for n in (1, 2, 3)] + [x.sum(0)],
        ["gather", "max", "min", "sum"],
    )
    g = synk.function(
        lambda x: [(x.mean(0) * torch.ones(size, device=x.device))] * 5, ["avg", "sum", "max", "min", "prod"]
    )
    synk.distribute()
    for n_rows in (1, ranks, 2 * ranks + 1):
        x = np.linspace(0.5, 2, n_rows, dtype="float32")[:, None]
        ends = [n_rows * rank // ranks for rank in range(ranks + 1)]
        parts = [part.mean() for part in np.split(x, ends[1:-1]) if len(part)]
        folds = [x.mean(), np.sum(parts), max(parts), min(parts), np.prod(parts)]
        for found, expected in zip(g(x), folds, strict=True):
            assert found.dtype == "float32" and found.shape == (size,)
            assert largest_error(found, np.full(size, expected)) < 1e-6
        assert largest_error(g(x, output_subset=[2])[0], np.full(size, max(parts))) < 1e-6
        if n_rows > ranks:
            mean, total, largest, least, product = g(x, num_slices=2)
            cut = [np.split(part, [len(part) // 2]) for part in np.split(x, ends[1:-1])]
            halves = [half.mean() for part in cut for half in part if len(half)]
            assert largest_error(mean, np.full(size, x.mean())) < 1e-6
            assert largest_error(total, np.full(size, np.sum(halves))) < 1e-6
            assert largest_error(product, np.full(size, np.prod(halves))) < 1e-6
            assert largest[0] == largest[-1] == max(halves) and least[0] == min(halves)
        if DEVICES and n_rows > 1:
            assert synk.session.current_team("").context.gpu.reducer._n_elements == size, "reduced on the GPU"
        if n_rows == 1 or n_rows == ranks:
            rows, largest, least, total = f(x)
            assert np.array_equal(rows, np.repeat(x, size, 1))
            assert largest_error(largest, np.full((1, size), 4 if n_rows > 1 else 1)) < 1e-6
            assert largest_error(least, np.full((1, size), 1.5)) < 1e-6
            assert largest_error(total, x.sum(0)) < 1e-6
            assert [np.array_equal(found, largest) for found in f(x, output_subset=[1, 1])] == [True, True]
    with pytest.raises(ValueError, match=r"parts of different shapes.*max needs equal ones"):
        f(np.ones((2 * ranks + 1, 1), "float32"))


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_all_reduce_of_a_single_tensor_that_may_change_its_shape(ranks: int, kind: str) -> None:
    tensor = synk.share(torch.zeros(3, dtype=getattr(torch, kind)))
    synk.function(lambda: tensor * 1, None)
    synk.distribute()
    folds = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "avg": np.mean}
    for length in (3, 770, 0, 2):
        values = np.random.default_rng(3).integers(1, 9, (ranks, length)).astype(kind)
        for op, fold in list(folds.items())[: 4 if kind == "int64" else 5]:
            for rank, value in enumerate(values):
                synk.set_value(rank, tensor, value)
            synk.all_reduce(tensor, op)
            found = synk.gather(tensor)
            assert all(np.array_equal(value, found[0]) for value in found)
            assert largest_error(found[0], fold(values, 0)) < 1e-6
    assert tensor.cpu().numpy().tolist() == found[0].tolist()


def test_buffers_of_a_module_are_each_ranks_own(ranks: int) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    net, lone = synk.share(make()), make()
    f = synk.function(lambda x: net(x) * 1, "gather", updates=[synk.grads(net)])
    synk.distribute()
    x = np.random.default_rng(0).normal(size=(6 * ranks, 3)).astype("float32")
    found = f(x)
    parts = [lone(torch.from_numpy(part)) for part in np.split(x, ranks)]
    assert largest_error(found, torch.cat(parts).detach()) < 1e-5
    assert synk.gather("int64 buffers of Sequential").tolist() == [[1]] * ranks
    synk.all_reduce("float32 buffers of Sequential")
    inputs = torch.nn.functional.linear(torch.from_numpy(x), lone[0].weight, lone[0].bias).detach()
    means = inputs.reshape(ranks, 6, 4).mean(1).mean(0)
    found = synk.gather("float32 buffers of Sequential")[:, :4]
    assert largest_error(found, np.tile(0.1 * means, (ranks, 1))) < 1e-5, "0.1: BatchNorm1d's momentum"
    f(x, num_slices=2)
    assert net[1].num_batches_tracked.item() == 3


def test_stored_rows_of_a_shared_tensor(ranks: int) -> None:
    stored = synk.share(torch.zeros(4, 3, dtype=torch.float64))
    f = synk.function(lambda: torch.tanh(stored).sum(0), "sum", sliceable_shareds=[stored])
    synk.distribute()
    values = np.random.default_rng(3).normal(size=(10, 3))
    synk.scatter(stored, values)
    ends = [10 * rank // ranks for rank in range(ranks + 1)]
    assert synk.get_lengths(stored) == np.diff(ends).tolist()
    assert largest_error(f(num_slices=2), np.tanh(values).sum(0)) < 1e-10
    parts = np.split(values, ends[1:-1])
    chosen = np.concatenate([part[[2, 0]] for part in parts])
    for batch_s in ([2, 0], torch.tensor([2, 0]), [torch.tensor([2, 0])] * ranks):
        assert largest_error(f(batch_s=batch_s), np.tanh(chosen).sum(0)) < 1e-10
    ends_of_slice = slice(torch.tensor(0), torch.tensor(2))
    assert np.array_equal(f(batch_s=ends_of_slice), f(batch_s=slice(0, 2)))
    with pytest.raises(ValueError, match="row 18446744073709551615 goes past the end"):
        f(batch_s=np.array([2**64 - 1], np.uint64))
    assert np.array_equal(synk.gather(stored, nd_up=0), values)


def test_only_a_slice_with_step_1_lets_a_callable_write_stored_rows(ranks: int) -> None:
    stored = synk.share(torch.zeros(4))
    f = synk.function(lambda: stored.add_(1).sum(), "sum", sliceable_shareds=[stored])
    synk.distribute()
    for batch_s in (slice(0, 3, 2), slice(3, None, -1), [0, 1], torch.arange(4) > 1):
        f(batch_s=batch_s)
    assert not synk.gather(stored).any()
    f(batch_s=slice(1, 3))
    assert synk.gather(stored).tolist() == [[0, 1, 1, 0]] * ranks


def test_stored_rows_without_columns(ranks: int) -> None:
    stored = synk.share(torch.zeros(4, 0))
    f = synk.function(lambda: len(stored), "sum", sliceable_shareds=[stored])
    synk.distribute()
    assert f(batch_s=[3, 1], num_slices=2) == 2 * ranks


def test_each_rank_has_its_own_random_numbers(ranks: int) -> None:
    def draw():
        return torch.rand(1), torch.from_numpy(np.random.rand(1))

    f = synk.function(draw, ["gather", "gather"], name="draw")
    synk.distribute()
    for values in f():
        assert len(set(values.tolist())) == ranks


def test_a_sliced_call_that_changes_what_it_did_not_declare_is_an_error(ranks: int) -> None:
    net = synk.share(make_net())
    before = [param.detach().clone() for param in net.parameters()]

    def shift(x):
        with torch.no_grad():
            next(net.parameters()).add_(1)
        return x.sum()

    def backward(x):
        net(x).sum().backward()
        return x.sum()

    f, g = synk.function(shift, "sum", name="shift"), synk.function(backward, "sum", name="backward")
    declared = synk.function(shift, "sum", updates=[(synk.weights(net), "max")])
    synk.distribute()
    x = np.ones((12, 4))
    with pytest.raises(
        RuntimeError, match="shift changes weights of Sequential, which is not among its updates"
    ):
        f(x, num_slices=2)
    with pytest.raises(RuntimeError, match="backward changes gradients of Sequential"):
        g(x, num_slices=2)
    synk.broadcast(synk.weights(net), np.concatenate([value.cpu().numpy().ravel() for value in before]))
    assert declared(x, num_slices=3) == 48
    first = next(net.parameters()).detach()
    assert largest_error(first.cpu(), before[0].cpu() + 1) < 1e-12, "once, not three times"


def test_a_sliced_call_that_replaces_what_it_did_not_declare_is_an_error(ranks: int) -> None:
    tensor, net = synk.share(torch.ones(2, 2)), synk.share(make_net())

    def replace(x):
        tensor.data = tensor.data + 1
        return x.sum()

    def turn(x):
        tensor.data = tensor.data.t()
        return x.sum()

    def double(x):
        net[0].weight.data = net[0].weight.data * 2
        return x.sum()

    callables = {"tensor ": replace, "tensor": turn, "weights of Sequential": double}
    made = [synk.function(each, "sum") for each in callables.values()]
    synk.distribute()
    for name, f in zip(callables, made, strict=True):
        with pytest.raises(RuntimeError, match=f"changes {name}.*not among its updates"):
            f(np.ones(12), num_slices=2)


def test_slices_gathered_into_a_module_s_vector_are_refused(ranks: int) -> None:
    net = synk.share(make_net())
    size = sum(param.numel() for param in net.parameters())

    def shift(x):
        with torch.no_grad():
            next(net.parameters()).add_(1)
        return x.sum()

    f = synk.function(shift, "sum", updates=[(synk.weights(net), "gather")])
    synk.distribute()
    with pytest.raises(ValueError, match=f"weights of Sequential have {size} elements in all, the value has"):
        f(np.ones(12), num_slices=2)
    synk.broadcast(synk.weights(net), np.ones(size))
    assert synk.gather(synk.weights(net)).tolist() == [[1] * size] * ranks


def test_an_output_may_be_a_conjugate_view(ranks: int) -> None:
    f = synk.function(lambda x: x.conj(), "gather")
    synk.distribute()
    assert f(np.full(4, 1j)).tolist() == [-1j] * 4


def test_parameters_with_a_default_are_no_inputs(ranks: int) -> None:
    def scale(x, by=1, *, plus=0, **others):
        return by * x + plus

    with pytest.raises(TypeError, match=r"\*\*others.*positional"):
        synk.function(scale, "gather")

    def shift(x, y, *, plus=0):
        return x + y + plus

    f = synk.function(functools.partial(shift, y=1, plus=2), "gather")
    synk.distribute()
    assert f(np.zeros(4)).tolist() == [3] * 4


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.int64, "avg"), (torch.bool, "avg"), (torch.bool, "sum"), (torch.bool, "prod")]
)
def test_a_callable_refuses_an_update_mode_that_the_dtype_lacks(
    ranks: int, dtype: torch.dtype, mode: str
) -> None:
    """The mean of counts would be cut off after the point: 5.999... becomes 5, on some ranks only."""
    count = synk.share(torch.zeros(1, dtype=dtype))
    lacks = rf"counting: update 0 of '.*' is {str(dtype).removeprefix('torch.')}, which has no {mode}"
    with pytest.raises(TypeError, match=lacks):
        synk.function(lambda x: count.add_(1), None, updates=[(count, mode)], name="counting")
    synk.function(lambda x: None, None, updates=[(count, "max")])


def test_what_a_callable_may_not_be(ranks: int) -> None:
    net = synk.share(make_net())
    if DEVICES:
        with pytest.raises(UserError, match="graph: PyTensor has no code for GPUs"):
            synk.function([], None, name="graph")
    with pytest.raises(TypeError, match="bfloat16, a dtype that NumPy lacks"):
        synk.share(torch.zeros(2, dtype=torch.bfloat16))
    with torch.inference_mode():
        tensor = torch.zeros(2)
    with pytest.raises(TypeError, match="a tensor was made in inference_mode"):
        synk.share(tensor)
    with pytest.raises(TypeError, match=r"\*rest.*positional"):
        synk.function(lambda *rest: 0, None)
    with pytest.raises(ValueError, match="bcast_inputs has 'z', inputs are x"):
        synk.function(lambda x: 0, None, bcast_inputs=["z"])
    with pytest.raises(TypeError, match="not shared"):
        synk.function(lambda x: 0, None, updates=[torch.zeros(1)])
    for rowless in (synk.weights(net), synk.share(torch.tensor(1.0))):
        with pytest.raises(TypeError, match=r"sliceable .* has no rows"):
            synk.function(lambda x: 0, None, sliceable_shareds=[rowless])
    with pytest.raises(TypeError, match=r"use synk.weights\(module\)"):
        synk.function(lambda x: 0, None, updates=[next(net.parameters())])
    with pytest.raises(TypeError, match="givens: a callable has no such option"):
        synk.function(lambda x: 0, None, givens=[])
    with pytest.raises(ValueError, match="unknown mode 'median'"):
        synk.function(lambda x: 0, "median")
    with pytest.raises(ValueError, match="is not shared"):
        synk.weights(make_net())
    with pytest.raises(TypeError, match=r"grads\(\) takes a module, not Parameter.*ParameterList"):
        synk.grads(synk.share(torch.nn.Parameter(torch.ones(1))))
    with pytest.raises(TypeError, match="one dtype"):
        synk.share(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double()))
    for part in (torch.nn.Sequential(net, torch.nn.Linear(2, 1).double()), net[0]):
        with pytest.raises(
            ValueError, match=rf"{type(part).__name__} has .* in common with 'weights of Sequential'"
        ):
            synk.share(part)
    with pytest.raises(TypeError, match=r"tanh.* has no readable signature"):
        synk.function(torch.tanh, "gather")


def test_what_a_callable_may_not_take_or_return(ranks: int) -> None:
    net = synk.share(make_net())
    lock = threading.Lock()
    module = synk.function(net, "gather")
    nothing = synk.function(lambda x: None, "sum", name="nothing")
    wrong = synk.function(lambda x: (x.sum(), x.sum()), ["sum"], name="wrong")
    whole = synk.function(lambda x: x.long().sum(), "avg", name="whole")
    pair = synk.function(lambda x: (net(x).sum(), x.sum()), "avg", name="pair")
    away = synk.function(lambda x: (x.to("meta"), x.to("meta")), "avg", name="away")
    synk.distribute()
    with pytest.raises(TypeError, match="wrong returned 2 outputs, 1 have modes"):
        wrong(np.ones(6))
    assert module(np.ones((5, 4))).shape == (5, 2), "a module is a callable, too"
    with pytest.raises(TypeError, match=r"pair: output 0 is tuple: .* need a list of modes"):
        pair(np.ones((6, 4)))
    with pytest.raises(TypeError, match=r"away: output 0 is tuple: can't convert .* need a list of modes"):
        away(np.ones(6))
    with pytest.raises(TypeError, match="nothing: input x is >f8, which torch has not"):
        nothing(np.ones(6, ">f8"))
    with pytest.raises(TypeError, match=r"nothing: input x: .*BFloat16"):
        nothing(torch.ones(6, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"data 'odd': .*requires grad"):
        synk.data(torch.ones(6, requires_grad=True), name="odd")
    with pytest.raises(TypeError, match="nothing: output 0 is NoneType, which has no sum"):
        nothing(np.ones(6))
    for _ in range(2):
        with pytest.raises(TypeError, match="nothing: input x is <U1, which torch has not"):
            nothing(np.array(["a"]))
    with pytest.raises(TypeError, match=r"int64, which has no avg: cast .*, or use sum, max, min or prod\n"):
        whole(np.ones(6))
    synk.function(lambda x: lock, None, name="locked")
    with pytest.raises(TypeError, match="function 'locked': 'lock', which it uses, can't go to the ranks"):
        synk.distribute()
    script = {"locks": [lock], "sin": torch.sin}
    exec("def use(x):\n    return [sin(each) for each in x if locks]", script)
    synk.function(script["use"], None, name="using")
    with pytest.raises(TypeError, match="function 'using': 'locks', which it uses, can't go to the ranks"):
        synk.distribute()
    assert synk.distribute() is None, "the function that can't go over is passed over from now on"


@pytest.mark.slow
def test_values_stay_when_the_team_is_closed() -> None:
    """In ordinary memory, where the next team finds them."""
    net = make_net()
    for number in range(2):
        with team(len(DEVICES) or 2, devices=DEVICES or None):
            synk.share(net)
            synk.function(lambda: None, None, updates=[synk.weights(net)])
            synk.distribute()
            synk.broadcast(synk.weights(net), np.arange(37.0) + number)
        values = torch.cat([param.detach().reshape(-1) for param in net.parameters()])
        assert values.tolist() == (np.arange(37.0) + number).tolist()
