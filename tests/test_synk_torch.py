"""Functions that are torch callables: the same engine, on tensors that all ranks share."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from synk_teams import largest_error, team

import lockstep.synk as synk


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(1)
    with team(request.param) as size:
        yield size


def make_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    return torch.nn.Sequential(*layers).double()


def test_every_mode_is_exact_for_any_rows_and_slices(ranks: int) -> None:
    def compute(x, y, weight):
        rows = torch.tanh(x) * weight + y[:, None]
        return rows.mean(0), rows.sum(0), rows.amax(0), rows.amin(0), rows.prod(0), rows, rows.sum().item()

    modes = ["avg", "sum", "c_max", "min", "prod", "gather", None]
    f = synk.function(compute, modes, bcast_inputs=["weight"])
    synk.distribute()
    random = np.random.default_rng(1)
    for n_rows in (1, 2, 7, 29):
        x, y = random.uniform(0.5, 1.5, (n_rows, 3)), random.uniform(-0.1, 0.1, n_rows)
        rows = np.tanh(x) * 1.5 + y[:, None]
        folds = [rows.mean(0), rows.sum(0), rows.max(0), rows.min(0), rows.prod(0), rows]
        for n_slices in (1, 2, 5):
            found = f(x, y, weight=1.5, num_slices=n_slices)
            for value, expected in zip(found[:6], folds, strict=True):
                assert largest_error(value, expected) < 1e-10
        batch = random.integers(0, n_rows, 5)
        assert largest_error(f(x, y, 1.5, batch=batch, output_subset=[1])[0], rows[batch].sum(0)) < 1e-10
        assert largest_error(f.alone(x, y, 1.5)[1], rows.sum(0)) < 1e-12


def test_training_is_that_of_one_process(ranks: int) -> None:
    net, lone = synk.share(make_net()), make_net()
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
    for number in range(10):
        n_rows = int(random.integers(1, 20))
        x, y = random.normal(size=(n_rows, 4)), random.normal(size=(n_rows, 2))
        found = f(x, y, num_slices=1 + number % 3)
        synk.all_reduce(synk.grads(net), by_rows=True)
        step()
        reference.zero_grad()
        expected = loss(lone(torch.from_numpy(x)), torch.from_numpy(y))
        expected.backward()
        reference.step()
        assert abs(found - expected.item()) < 1e-10
    weights = synk.gather(synk.weights(net))
    assert all(np.array_equal(weights[rank], weights[0]) for rank in range(ranks)), (
        "replicas are bitwise equal"
    )
    for ours, theirs in zip(net.parameters(), lone.parameters(), strict=True):
        assert largest_error(ours.detach(), theirs.detach()) < 1e-10


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
    assert largest_error(f(batch_s=[2, 0]), np.tanh(chosen).sum(0)) < 1e-10
    assert np.array_equal(synk.gather(stored, nd_up=0), values)


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
    synk.set_value(0, synk.weights(net), np.concatenate([b.numpy().reshape(-1) for b in before]))
    synk.broadcast(synk.weights(net))
    assert declared(x, num_slices=3) == 48
    assert largest_error(next(net.parameters()).detach(), before[0] + 1) < 1e-12, "once, not three times"


def test_what_a_callable_may_not_be(ranks: int) -> None:
    net = synk.share(make_net())
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"\*rest.*positional"):
        synk.function(lambda *rest: 0, None)
    with pytest.raises(ValueError, match="bcast_inputs has 'z', inputs are x"):
        synk.function(lambda x: 0, None, bcast_inputs=["z"])
    with pytest.raises(TypeError, match="not shared"):
        synk.function(lambda x: 0, None, updates=[torch.zeros(1)])
    with pytest.raises(TypeError, match=r"use synk.weights\(module\)"):
        synk.function(lambda x: 0, None, updates=[next(net.parameters())])
    with pytest.raises(TypeError, match="givens: a callable has no such option"):
        synk.function(lambda x: 0, None, givens=[])
    with pytest.raises(ValueError, match="unknown mode 'median'"):
        synk.function(lambda x: 0, "median")
    with pytest.raises(ValueError, match="is not shared"):
        synk.weights(make_net())
    with pytest.raises(TypeError, match="one dtype"):
        synk.share(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double()))
    wrong = synk.function(lambda x: (x.sum(), x.sum()), ["sum"], name="wrong")
    whole = synk.function(lambda x: x.long().sum(), "avg", name="whole")
    synk.distribute()
    with pytest.raises(TypeError, match="wrong returned 2 outputs, 1 have modes"):
        wrong(np.ones(6))
    with pytest.raises(TypeError, match="int64, which has no avg"):
        whole(np.ones(6))
    synk.function(lambda x: lock, None, name="locked")
    with pytest.raises(TypeError, match="function 'locked': 'lock', which it uses can't go to the ranks"):
        synk.distribute()
    assert synk.distribute() is None, "the function that can't go over is passed over from now on"
