"""Settings that a program changes between calls apply on all ranks; inputs that callables write into."""

import copy
import enum
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from synk_teams import team

import lockstep.synk as synk
from lockstep.exchange.reduction import reduce_arrays
from lockstep.synk.extensions import make_step, torch_train

LOSS = torch.nn.functional.mse_loss


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    with team(2):
        yield


def make_net(*more: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), *more).to(torch.float64)


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=(8, 4)), random.normal(size=(8, 3))


def test_the_training_mode_is_that_of_the_caller_on_all_ranks() -> None:
    net = make_net(torch.nn.Dropout(0.5))
    synk.share(net)
    f = synk.function(net, "gather")
    synk.distribute()
    x, _ = rows()
    for _ in range(2):
        net.eval()
        with torch.no_grad():
            expected = net(torch.from_numpy(x)).numpy()
        for _ in range(2):
            assert np.allclose(f(x), expected, rtol=1e-12), "rank 1 drops nothing out"
        net.train()
        dropped = f(x) == 0
        assert dropped[:4].any()
        assert dropped[4:].any()


def test_parameters_that_are_frozen_between_steps_are_frozen_on_all_ranks() -> None:
    """Fine-tuning trains the head first, then all layers. A frozen weight does not decay either."""
    net = make_net(torch.nn.Tanh(), torch.nn.Linear(3, 3).double())
    plain = copy.deepcopy(net)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    step = torch_train.make_train_function(net, LOSS, torch.optim.SGD(net.parameters(), **settings))
    synk.distribute()
    optimizer = torch.optim.SGD(plain.parameters(), **settings)
    x, y = rows()
    for trains in (True, False, False, True, True):
        for each in (net, plain):
            each[0].requires_grad_(trains)
        step(x, y)
        optimizer.zero_grad()
        LOSS(plain(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
        expected = torch.nn.utils.parameters_to_vector(plain.parameters()).detach().numpy()
        for rank in synk.gather(synk.weights(net), nd_up=1):
            assert np.allclose(rank, expected, rtol=1e-12)


def test_gradients_of_shared_tensors_and_lone_parameters_are_required_on_all_ranks() -> None:
    """A tensor, a prompt for instance, and parameters that a callable holds without their module."""
    prompt, net = synk.share(torch.ones(1)), synk.share(make_net())
    parameters = list(net.parameters())
    f = synk.function(lambda: torch.tensor([[t.requires_grad for t in (prompt, *parameters)]]), "gather")
    synk.distribute()
    assert f().tolist() == [[False, True, True]] * 2
    prompt.requires_grad_()
    net[0].weight.requires_grad_(False)
    assert f().tolist() == [[True, False, True]] * 2
    prompt.requires_grad_(False)
    assert f().tolist() == [[False, False, True]] * 2


def test_a_mode_that_a_failed_call_has_brought_is_taken_back() -> None:
    net = make_net(torch.nn.Dropout(0.5))
    synk.share(net)
    failing = [True]

    def compute(x, fails):
        if fails.sum() > 0:
            raise ArithmeticError("no good")
        return net(x)

    f = synk.function(compute, "gather", bcast_inputs=["fails"])
    synk.distribute()
    x, _ = rows()
    no, yes = np.zeros(1), np.ones(1)
    f(x, no)
    net.eval()
    with pytest.raises(ArithmeticError):
        f(x, yes)
    net.train()
    assert (f(x, no)[4:] == 0).any()
    assert failing


def schedulers(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.2, torch.tensor(0.2, dtype=torch.float64)])
def test_a_scheduler_in_the_caller_holds_on_all_ranks(rate: Any) -> None:
    net, lone = synk.share(make_net()), make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    reference = torch.optim.SGD(lone.parameters(), lr=float(rate))
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    scheduler, expected = schedulers(optimizer), schedulers(reference)
    x, y = rows()
    for number in range(5):
        learning_rate = 0.3 if number == 3 else None
        step(x, y, learning_rate=learning_rate)
        if learning_rate is not None:
            reference.param_groups[0]["lr"] = learning_rate
        reference.zero_grad()
        LOSS(lone(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        reference.step()
        scheduler.step()
        expected.step()
    first, second = synk.gather(synk.weights(net))
    assert np.array_equal(first, second)
    flat = np.concatenate([param.detach().numpy().ravel() for param in lone.parameters()])
    assert np.abs(first - flat).max() < 1e-12


@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_rate_that_becomes_a_tensor_or_a_number_rounds_alike_on_all_ranks(is_tensor: bool) -> None:
    net = synk.share(torch.nn.Linear(4, 3))
    rates = [torch.tensor(0.1), 0.037] if is_tensor else [0.1, torch.tensor(0.037)]
    optimizer = torch.optim.Adam(net.parameters(), lr=rates[0], foreach=False)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    x, y = (array.astype("float32") for array in rows())
    step(x, y)
    optimizer.param_groups[0]["lr"] = rates[1]
    for _ in range(30):
        step(x, y)
    first, second = synk.gather(synk.weights(net))
    assert np.array_equal(first, second)


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.1)


def train_steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train in one process."""
    x, y = (torch.from_numpy(array) for array in rows())
    for _ in range(number):
        optimizer.zero_grad()
        LOSS(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("n_before", [0, 2], ids=["before the first step", "between steps"])
def test_a_loaded_state_of_an_optimizer_goes_to_all_ranks(n_before: int) -> None:
    reference = make_net()
    saved_from = adam(reference)
    train_steps(reference, saved_from, 3)
    weights, state = copy.deepcopy((reference.state_dict(), saved_from.state_dict()))
    train_steps(reference, saved_from, 3)

    net = synk.share(make_net())
    optimizer = adam(net)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    for _ in range(n_before):
        step(*rows())
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    synk.broadcast(synk.weights(net))
    for _ in range(3):
        step(*rows())
    first, second = synk.gather(synk.weights(net))
    assert np.array_equal(first, second)
    flat = np.concatenate([param.detach().numpy().ravel() for param in reference.parameters()])
    assert np.abs(first - flat).max() < 1e-12


def test_other_parameters_of_a_shared_module_are_refused() -> None:
    net = synk.share(make_net())
    synk.function(net, "gather")
    synk.distribute()
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    synk.broadcast(synk.weights(net))
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    for use in (synk.weights, synk.grads, synk.share):
        with pytest.raises(ValueError, match="other parameters than when it was shared"):
            use(net)


def test_buffers_that_no_vector_has_are_refused() -> None:
    net = synk.share(make_net(torch.nn.BatchNorm1d(3, affine=False)))
    f = synk.function(net, "gather")
    synk.distribute()
    vectors = synk.buffers(net)
    net[0].register_buffer("scale", torch.ones(3))
    with pytest.raises(ValueError, match=r"Sequential has got the buffer '0\.scale' since it was shared"):
        synk.buffers(net)
    f(rows()[0])
    synk.all_reduce(synk.weights(net))  # the vector of the weights is complete
    del net[0].scale
    assert synk.buffers(net) == vectors
    net[1] = copy.deepcopy(net[1])
    with pytest.raises(ValueError, match=r"has got the buffer '1\.running_mean'"):
        synk.buffers(net)


def _assign(net: torch.nn.Sequential) -> None:
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)


def _replace_layer(net: torch.nn.Sequential) -> None:
    net[-1] = copy.deepcopy(net[-1])


def _replace_parameter(net: torch.nn.Sequential) -> None:
    net[0].weight = torch.nn.Parameter(net[0].weight.detach().clone())


def _append_layer(net: torch.nn.Sequential) -> None:
    net.append(torch.nn.Linear(3, 3).to(torch.float64))


def _set_layer(net: torch.nn.Sequential) -> None:
    net[1].head = torch.nn.Linear(3, 3).to(torch.float64)


def _add_parameter(net: torch.nn.Sequential) -> None:
    net[1].scale = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))


class _Head(torch.nn.Module):
    """A module that may get parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head: torch.nn.Module | None = None
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.head is None else self.head(x)
        return x if self.scale is None else x * self.scale


@pytest.mark.parametrize("change", [_append_layer, _set_layer, _add_parameter])
def test_a_call_refuses_more_parameters_of_a_shared_module(
    change: Callable[[torch.nn.Sequential], None],
) -> None:
    net = synk.share(make_net(_Head()))
    f = synk.function(net, "gather")
    synk.distribute()
    before = f(rows()[0])
    change(net)
    with pytest.raises(ValueError, match="has other parameters than at distribute"):
        f(rows()[0])
    net._modules.pop("2", None)
    net[1].head = net[1].scale = None
    assert np.array_equal(f(rows()[0]), before), "the program may remove what it added"


@pytest.mark.parametrize("change", [_assign, _replace_layer, _replace_parameter])
def test_a_call_refuses_other_parameters_of_a_shared_module(
    change: Callable[[torch.nn.Sequential], None],
) -> None:
    """The other ranks would compute with those that they have."""
    net = synk.share(make_net())
    step = torch_train.make_train_function(net, LOSS, torch.optim.SGD(net.parameters(), lr=0.1))
    synk.distribute()
    step(*rows())
    children, parameters = dict(net._modules), dict(net[0]._parameters)
    change(net)
    with pytest.raises(ValueError, match="has other parameters than at distribute"):
        step(*rows())
    net._modules.update(children)
    net[0]._parameters.update(parameters)
    step(*rows())  # the program may put back what it replaced


def test_another_number_of_parameter_groups_is_refused() -> None:
    net = synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    step(*rows())
    groups = list(optimizer.param_groups)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="SGD has 2 groups of parameters, 1 at distribute"):
        step(*rows())
    optimizer.param_groups[:] = groups
    step(*rows())


def test_functions_made_after_a_group_of_parameters_was_added_work() -> None:
    net, head = synk.share(make_net()), synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    other = synk.function(lambda x: net(x).mean(0), "avg")
    synk.distribute()
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.2})
    other(rows()[0])
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    reference = copy.deepcopy(net)
    for learning_rate in (0.1, 0.3):
        optimizer.param_groups[0]["lr"] = learning_rate
        step(*rows())
        train_steps(reference, torch.optim.SGD(reference.parameters(), lr=learning_rate), 1)
    other(rows()[0])
    flat = np.concatenate([param.detach().numpy().ravel() for param in reference.parameters()])
    assert np.abs(synk.gather(synk.weights(net)) - flat).max() < 1e-12


def test_a_loaded_state_goes_to_functions_of_an_earlier_distribute_too() -> None:
    net = synk.share(make_net())
    optimizer = adam(net)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    step(*rows())
    state = copy.deepcopy(optimizer.state_dict())
    step(*rows())
    optimizer.load_state_dict(state)
    synk.function(lambda x: optimizer.param_groups[0]["lr"] + 0 * x.mean(), "avg")
    synk.distribute()
    step(*rows())
    first, second = synk.gather(synk.weights(net))
    assert np.array_equal(first, second)


def test_functions_of_two_distributes_share_an_optimizers_state() -> None:
    net = synk.share(make_net())
    optimizer = adam(net)
    steps = []
    for _ in range(2):
        steps.append(torch_train.make_train_function(net, LOSS, optimizer))
        synk.distribute()
    reference = copy.deepcopy(net)
    for number in (0, 1, 1, 0, 0, 1):
        steps[number](*rows())
    train_steps(reference, adam(reference), 6)
    flat = np.concatenate([param.detach().numpy().ravel() for param in reference.parameters()])
    assert np.abs(synk.gather(synk.weights(net)) - flat).max() < 1e-12


class Accumulating(torch.optim.Optimizer):
    """Its sums are float64, and its last gradients are in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["sum"] = state.get("sum", 0) + param.grad.double() / 3
            state["last"] = [*state.get("last", []), param.grad.double() / 3][-2:]
            param.sub_((0.01 * state["sum"] + 0.01 * sum(state["last"])).to(param.dtype))


@pytest.mark.parametrize(
    ("make_optimizer", "dtype"), [(torch.optim.NAdam, torch.float64), (Accumulating, torch.float32)]
)
def test_a_state_that_is_sent_keeps_its_dtypes(make_optimizer: Any, dtype: torch.dtype) -> None:
    net = synk.share(make_net().to(dtype))
    optimizer = make_optimizer(net.parameters())
    steps = []
    for _ in range(2):
        steps.append(torch_train.make_train_function(net, LOSS, optimizer))
        synk.distribute()
    data = [array.astype(str(dtype).removeprefix("torch.")) for array in rows()]
    for number in (0, 1) * 4:
        steps[number](*data)
        first, second = synk.gather(synk.weights(net))
        assert np.array_equal(first, second)


def test_a_step_of_functions_of_two_distributes_is_refused() -> None:
    net = synk.share(make_net())
    optimizer = adam(net)
    functions = []
    for name in ("gradient", "update"):
        functions.append(synk.function(optimizer.zero_grad, None, name=name))
        synk.distribute()
    step = make_step(functions[0], synk.grads(net), functions[1])
    with pytest.raises(ValueError, match="'gradient' and 'update' were sent by two calls of distribute"):
        step([], [])


def test_an_empty_state_that_is_loaded_before_each_step_goes_to_all_ranks() -> None:
    net = synk.share(make_net())
    optimizer = adam(net)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    empty = optimizer.state_dict()
    reference = copy.deepcopy(net)
    for _ in range(3):
        optimizer.load_state_dict(empty)
        step(*rows())
        train_steps(reference, adam(reference), 1)
    flat = np.concatenate([param.detach().numpy().ravel() for param in reference.parameters()])
    assert np.abs(synk.gather(synk.weights(net)) - flat).max() < 1e-12


def test_a_callable_that_writes_into_data_is_told() -> None:
    def halve(x):
        return x.mul_(0.5).sum()

    f = synk.function(halve, "sum")
    g = synk.function(halve, "sum", bcast_inputs=["x"])
    synk.distribute()
    data = synk.data(np.ones(6))
    with pytest.raises(RuntimeError, match=r"writes into its input x.*x\.clone\(\)"):
        f(data)
    data.set_value(np.ones(6))
    with pytest.raises(RuntimeError, match="writes into its input x"):
        f(data, batch=slice(0, 4), num_slices=2)
    with pytest.raises(RuntimeError, match="writes into its input x"):
        g(np.ones(6))
    data.set_value(np.ones(6))
    assert f(data, batch=[0, 1, 2]) == 1.5
    assert f(np.ones(6)) == 3
    assert f(np.ones(6), num_slices=3) == 3
    assert f.alone(data) == 3
    assert (data[:] == 1).all()


def test_a_callable_that_holds_a_function_or_data_is_refused() -> None:
    inner, data = synk.function(lambda x: x, "gather", name="inner"), synk.data(np.ones(3), name="held")
    for held, words in (
        (inner, r"function 'inner'> can't be pickled"),
        (data, r"'held' .* can't be pickled"),
    ):

        def outer(x, held=held):
            return x

        synk.function(outer, "gather", name="outer")
        with pytest.raises(TypeError, match=f"function 'outer' can't go to the ranks: .*{words}"):
            synk.distribute()
    synk.distribute()
    assert (inner(data) == 1).all()


@pytest.mark.parametrize("weights", [None, [0.25, 0.75]])
def test_the_mean_of_float16_is_summed_in_float32(weights: Any) -> None:
    parts = [np.full(5, 60000, np.float16), np.full(5, 60000, np.float16)]
    reduce_arrays(parts, parts, "mean", weights)
    assert all((part == 60000).all() and part.dtype == np.float16 for part in parts)


def test_float16_outputs_and_variables_have_a_mean() -> None:
    shared = synk.share(torch.full((4,), 60000.0, dtype=torch.float16))
    f = synk.function(lambda x: x.max(), "avg", name="largest")
    synk.distribute()
    x = np.full(7, 60000, np.float16)
    for n_slices in (1, 3):
        found = f(x, num_slices=n_slices)
        assert (found, found.dtype) == (60000, np.float16)
    synk.all_reduce(shared)
    assert (synk.reduce(shared, in_place=False) == 60000).all()


def test_settings_that_a_callable_changes_are_the_callers_in_the_next_call() -> None:
    net = synk.share(make_net(torch.nn.Dropout(0.5)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def evaluate(x):
        net.eval()
        optimizer.param_groups[0]["lr"] = 0.5
        return net(x)

    f = synk.function(evaluate, "gather")
    g = synk.function(lambda: torch.tensor([net.training, optimizer.param_groups[0]["lr"]]), "gather")
    synk.distribute()
    for n_rows in (8, 1):  # of one row, this process has none
        assert g().tolist() == [1, torch.tensor(0.1)] * 2
        f(rows()[0][:n_rows])
        net.train()
        optimizer.param_groups[0]["lr"] = 0.1
    assert g().tolist() == [1, torch.tensor(0.1)] * 2


def test_a_callable_of_a_step_may_change_hyperparameters() -> None:
    net = synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(found, y):
        optimizer.param_groups[0]["lr"] *= 0.5
        return LOSS(found, y)

    step = torch_train.make_train_function(net, loss, optimizer)
    synk.distribute()
    for _ in range(3):
        step(*rows())
        first, second = synk.gather(synk.weights(net))
        assert np.array_equal(first, second)


class Kind(enum.Enum):
    """A hyperparameter that no optimizer of torch has."""

    FIRST = 1
    SECOND = 2


def test_hyperparameters_may_be_of_classes_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Kind", Kind, raising=False)
    monkeypatch.setattr(Kind, "__module__", "__main__")
    net = synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    f = synk.function(lambda: torch.tensor([optimizer.param_groups[0]["kind"].value]), "gather")
    for kind in (Kind.FIRST, Kind.SECOND):
        group["kind"] = kind
        if kind is Kind.FIRST:
            synk.distribute()
        assert f().tolist() == [kind.value] * 2


@pytest.mark.slow
def test_a_hyperparameter_that_the_program_removes_is_removed_on_all_ranks() -> None:
    net = synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    f = synk.function(lambda: torch.tensor(["initial_lr" in optimizer.param_groups[0]]), "gather")
    synk.distribute()
    assert f().tolist() == [True, True]
    del optimizer.param_groups[0]["initial_lr"]
    assert f().tolist() == [False, False]


def test_a_call_with_another_optimizer_of_the_same_name_is_refused() -> None:
    """Ranks would step with the former optimizer, and the weights would differ."""
    net = synk.share(make_net())
    optimizer = first = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()

    def step_once() -> None:
        step()

    update = synk.function(step_once, None, updates=[synk.weights(net)])
    other = synk.function(lambda: torch.ones(1), "sum")
    synk.distribute()
    update()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    assert other() == 2
    with pytest.raises(ValueError, match="'optimizer' is another SGD than at distribute"):
        update()
    optimizer = first
    update()


@pytest.mark.slow
def test_a_callable_may_let_a_variable_name_another_optimizer() -> None:
    net = synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def restart() -> None:
        nonlocal optimizer
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    begin = synk.function(restart)
    rate = synk.function(lambda: torch.tensor([optimizer.param_groups[0]["lr"]]), "gather")
    synk.distribute()
    begin()
    assert rate().tolist() == [0.5, 0.5]


class Weights:
    """A class whose attribute a callable reads."""

    scale = 1.0


class Fitting:
    """A program's state in an object, as many programs keep it."""

    def __init__(self) -> None:
        self.net = synk.share(make_net())
        self.optimizer = self.make_optimizer()
        self.optimizers: dict[str, Any] = {"a": self.make_optimizer()}
        self.chosen: list[Any] = [self.make_optimizer()]
        self.later: Any = None
        self.scale, self.n_calls, self.label = 1.0, 0, "first"

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        optimizers = [self.optimizer, self.optimizers["a"], *self.chosen, self.later]
        rates = [each.param_groups[0]["lr"] for each in optimizers if each]
        return torch.stack([x.sum() * self._total(), torch.tensor(sum(rates))])

    def _total(self) -> float:
        return self.scale * Weights.scale * self.n_calls + len(self.label)


def _set_entry(fitting: Fitting) -> None:
    fitting.optimizers["a"] = fitting.make_optimizer()


def _set_place(fitting: Fitting) -> None:
    fitting.chosen[0] = fitting.make_optimizer()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda fitting: setattr(fitting, "optimizer", fitting.make_optimizer()), "self.optimizer"),
        (lambda fitting: setattr(fitting, "later", fitting.make_optimizer()), "self.later"),
        (_set_entry, "self.optimizers['a']"),
        (_set_place, "self.chosen[0]"),
    ],
)
@pytest.mark.slow
def test_attributes_and_entries_that_name_another_optimizer_are_refused(
    change: Callable[[Fitting], None], name: str
) -> None:
    fitting = Fitting()
    f = synk.function(fitting.compute, "sum")
    synk.distribute()
    f(np.ones((4, 2)))
    change(fitting)
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))} is another SGD than at distribute"):
        f(np.ones((4, 2)))


def test_an_attribute_without_an_optimizer_warns_and_with_another_one_is_refused() -> None:
    fitting = Fitting()
    f = synk.function(fitting.compute, "sum")
    synk.distribute()
    x, first = np.ones((4, 2)), fitting.optimizer
    fitting.optimizer = None  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"'self\.optimizer' is another NoneType"):
        f(x)
    fitting.optimizer = fitting.make_optimizer()
    with pytest.raises(ValueError, match=r"'self\.optimizer' is another SGD"):
        f(x)
    fitting.optimizer = first
    f(x)


def test_plain_values_that_differ_on_the_other_ranks_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a callable changes itself, on all ranks, and equal ones do not."""
    fitting = Fitting()
    f = synk.function(fitting.compute, "sum")
    synk.distribute()
    x = np.ones((4, 2))
    for _ in range(3):
        f(x)
    fitting.label = "".join(["fi", "rst"])
    f(x)
    fitting.scale = 2.0
    with pytest.warns(UserWarning, match=r"'self\.scale' is another float .*: pass it as an input") as warned:
        f(x)
    assert warned[0].filename == __file__
    f(x)
    monkeypatch.setattr(Weights, "scale", 3.0)
    with pytest.warns(UserWarning, match=r"'Weights\.scale' is another float"):
        f(x)
    fitting.n_calls = 70
    with pytest.warns(UserWarning, match=r"'self\.n_calls' is another int"):
        f(x)


def test_a_layer_of_the_program_that_reads_another_value_warns() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.factor

    net = torch.nn.Sequential(Scaled(), torch.nn.ReLU())
    f = synk.function(lambda x: net(x.float()).sum(), "sum")
    synk.share(net)
    synk.distribute()
    x = np.ones((4, 2))
    f(x)
    net.eval()
    f(x)
    net[0].factor = 2.0
    with pytest.warns(UserWarning, match=r"factor' is another float"):
        f(x)
    net[1] = torch.nn.GELU()
    with pytest.raises(ValueError, match=r"'net\.1' is another GELU"):
        f(x)


def test_a_function_that_is_defined_again_is_refused_if_it_is_another_one() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def define() -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: 2 * x

    helper = define()
    f = synk.function(lambda x: helper(x).sum(), "sum")
    synk.distribute()
    assert f(np.ones(4)) == 8
    helper = define()
    assert f(np.ones(4)) == 8
    helper = double
    with pytest.raises(ValueError, match="'helper' is another function than at distribute"):
        f(np.ones(4))


def test_functions_of_one_distribute_share_what_they_change() -> None:
    count = 0
    history: list[Any] = [None]

    def add() -> torch.Tensor:
        nonlocal count
        count += 1
        history[0] = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1 * count)
        return torch.tensor([count])

    def read() -> torch.Tensor:
        return torch.tensor([10 * count + bool(history[0])])

    f, g = synk.function(add, "gather"), synk.function(read, "gather")
    synk.distribute()
    for expected in (1, 2):
        assert f().tolist() == [expected] * 2
        assert g().tolist() == [10 * expected + 1] * 2
    count = 7
    with pytest.warns(UserWarning, match="'count' is another int"):
        assert g().tolist() == [71, 21]


def test_other_parameters_in_a_group_are_refused() -> None:
    net = synk.share(make_net(torch.nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    step(*rows())
    optimizer.param_groups[0]["params"] = list(net[1].parameters())
    with pytest.raises(ValueError, match="SGD has other parameters than at distribute"):
        step(*rows())
    optimizer.param_groups[0]["params"] = list(net.parameters())
    step(*rows())


def test_outputs_of_an_update_leave_those_of_its_step_alone() -> None:
    net = synk.share(make_net())

    def gradient(x):
        net.zero_grad()
        net(x).mean().backward()
        return torch.ones(5000)

    compute = synk.function(gradient, "sum", updates=[synk.grads(net)])
    update = synk.function(lambda: torch.full((5000,), 7.0), "sum")
    step = make_step(compute, synk.grads(net), update)
    synk.distribute()
    for _ in range(2):
        assert (step(rows()[0], []) == 2).all()


def test_a_list_of_numbers_is_one_input_of_a_step() -> None:
    net = synk.share(make_net())
    step = torch_train.make_train_function(
        net, lambda found, y: LOSS(found[:, 0], y), torch.optim.SGD(net.parameters())
    )
    synk.distribute()
    x, y = rows()
    expected = LOSS(net(torch.from_numpy(x))[:, 0], torch.from_numpy(y[:, 0])).item()
    assert abs(step(x, list(y[:, 0])) - expected) < 1e-12


def test_an_input_of_a_step_that_is_a_number_may_be_in_a_list_with_arrays() -> None:
    net = synk.share(make_net())

    def gradient(x, y, weight):
        net.zero_grad()
        loss = weight * LOSS(net(x), y)
        loss.backward()
        return loss

    compute = synk.function(gradient, "avg", bcast_inputs=["weight"], updates=[synk.grads(net)])
    step = make_step(compute, synk.grads(net), synk.function(lambda: None, None))
    synk.distribute()
    x, y = rows()
    expected = 0.5 * LOSS(net(torch.from_numpy(x)), torch.from_numpy(y)).item()
    for given in (([x], [y, 0.5]), ([x, y, np.array(0.5)], []), ([x, y], 0.5)):
        assert abs(step(*given) - expected) < 1e-12


@pytest.mark.parametrize("rate", ["0.1", True, -0.1, float("nan"), float("inf"), 1j, [0.1], torch.ones(1)])
def test_a_learning_rate_that_is_no_rate_is_refused_and_changes_nothing(rate: Any) -> None:
    net = synk.share(make_net())
    optimizer = adam(net)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"a training step: learning_rate=.* is not a number from 0 on"):
        step(*rows(), learning_rate=rate)
    assert optimizer.state_dict() == before
    step(*rows())


def test_a_step_does_not_write_into_a_tensor_that_gave_its_learning_rate() -> None:
    net = synk.share(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch_train.make_train_function(net, LOSS, optimizer)
    synk.distribute()
    rates = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for rate in rates:
        step(*rows(), learning_rate=rate)
        assert optimizer.param_groups[0]["lr"] == rate
    assert rates.tolist() == [0.5, 0.25]


def test_a_step_refuses_gradients_of_parameters_that_it_does_not_average() -> None:
    net = synk.share(make_net())
    scale = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
    step = torch_train.make_train_function(net, lambda found, y: LOSS(found * scale, y), optimizer)
    synk.distribute()
    before = synk.gather(synk.weights(net))
    with pytest.raises(
        ValueError, match=r"parameter of shape \(3,\) has a gradient, but is not in Sequential"
    ):
        step(*rows())
    assert np.array_equal(synk.gather(synk.weights(net)), before)


def test_an_optimizer_that_would_not_train_the_module_is_refused() -> None:
    other = torch.optim.SGD(make_net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the optimizer has no parameter of Sequential"):
        torch_train.make_train_function(synk.share(make_net()), LOSS, other)
