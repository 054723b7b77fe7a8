"""Modules that ranks share behave as torch's own: their weights, gradients, buffers, hooks and dtypes."""

import copy
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from limits import limit
from synk_teams import DEVICES, team

import lockstep.synk as synk
from lockstep.synk import session
from lockstep.synk.extensions import torch_train

SIZES = [len(DEVICES)] if DEVICES else [pytest.param(1, marks=pytest.mark.slow), 2]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with team(request.param, devices=DEVICES or None) as size:
        yield size


def make_net(*more: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), *more).to(torch.float64)


def flat(net: torch.nn.Module) -> np.ndarray:
    return np.concatenate([param.detach().numpy().ravel() for param in net.parameters()])


def test_a_value_of_another_length_changes_no_weight(ranks: int) -> None:
    net = synk.share(make_net())
    synk.function(net, "gather")
    synk.distribute()
    weights, before = synk.weights(net), flat(net)
    for write in (
        lambda: synk.broadcast(weights, np.full(5, 9.0)),
        lambda: synk.set_value(ranks - 1, weights, np.full(16, 9.0)),
        lambda: synk.scatter(weights, np.full(14, 9.0)),
    ):
        with pytest.raises(ValueError, match=r"weights of Sequential have 15 elements in all, .* has \d+"):
            write()
    assert flat(net).tobytes() == before.tobytes()
    synk.all_reduce(weights)
    assert all(value.tobytes() == before.tobytes() for value in synk.gather(weights))


class Heads(torch.nn.Module):
    """A network with a frozen layer, and a head that `forward` does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.frozen, self.used = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
        self.unused = torch.nn.Linear(5, 2)
        self.frozen.requires_grad_(False)
        self.to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(torch.tanh(self.frozen(x)))


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adam_w(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)


def by_rank(name: Any) -> list[bytes]:
    return [value.tobytes() for value in synk.gather(name)]


@pytest.mark.parametrize("make_optimizer", [sgd, adam_w])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_frozen_and_unused_parameters_keep_their_bits(
    ranks: int, make_optimizer: Any, num_slices: int
) -> None:
    net, plain = Heads(), Heads()
    optimizer, reference = make_optimizer(net), make_optimizer(plain)
    loss = torch.nn.functional.mse_loss
    step = torch_train.make_train_function(net, loss, optimizer)
    synk.distribute()
    random = np.random.default_rng(3)
    for number in range(6):
        n_rows = 1 if number == 1 else 8  # of one row, one rank has none, and its gradients are old ones
        x, y = random.normal(size=(n_rows, 4)), random.normal(size=(n_rows, 3))
        step(x, y, num_slices=num_slices)
        reference.zero_grad()
        loss(plain(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        reference.step()
    before = Heads()
    for name in ("frozen", "unused"):
        for param, expected in zip(
            getattr(net, name).parameters(), getattr(before, name).parameters(), strict=True
        ):
            assert param.grad is None
            assert torch.equal(param, expected), name
    assert np.abs(flat(net) - flat(plain)).max() < 1e-12
    assert num_slices > 1 or ranks > 1 or flat(net).tobytes() == flat(plain).tobytes()
    assert len(set(by_rank(synk.weights(net)))) == 1


def test_a_gradient_that_one_rank_has_is_on_all_after_the_exchange() -> None:
    def backward(x: torch.Tensor) -> None:
        for param in net.parameters():
            param.grad = None
        net[0 if x[0, 0] > 0 else 1](x).sum().backward()

    def which() -> list[bool]:
        return [param.grad is not None for param in net.parameters()]

    with team(2, devices=DEVICES or None):
        torch.manual_seed(1)
        net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))).to(torch.float64)
        synk.share(net)
        f = synk.function(backward, None, updates=[synk.grads(net)])
        has = synk.function(which, "gather")
        synk.distribute()
        mixed = np.array([[1.0, 1], [-1, 1]])

        def missing() -> list[list[bool]]:
            return has().reshape(2, 6).tolist()

        assert missing() == [[False] * 6] * 2
        f(mixed)
        assert missing() == [[True, True] + [False] * 4, [False, False, True, True, False, False]]
        synk.all_reduce(synk.grads(net))
        assert missing() == [[True] * 4 + [False] * 2] * 2
        assert synk.gather(synk.grads(net))[0].reshape(3, 6).any(1).tolist() == [True, True, False]
        for by_rows in (False, True):
            f(mixed)
            f(mixed[1:])  # rank 0 has no row, and keeps its gradients
            synk.all_reduce(synk.grads(net), by_rows=by_rows)
            assert missing() == [[not by_rows] * 2 + [True, True, False, False]] * 2
        f(mixed)
        synk.broadcast(synk.grads(net))
        assert missing() == [[True, True] + [False] * 4] * 2
        f(mixed)
        synk.reduce(synk.grads(net), "sum")
        assert missing()[0] == [True] * 4 + [False] * 2
        synk.broadcast(synk.grads(net), np.zeros(18))
        assert missing() == [[True] * 6] * 2


def test_a_cast_after_share_is_refused(ranks: int) -> None:
    net = synk.share(make_net(torch.nn.BatchNorm1d(3)))
    before = flat(net)
    f = synk.function(net, "gather")
    weights, words = synk.weights(net), r"is torch\.float16 now, and was torch\.float64 at share\(\)\. Cast"
    tensor = synk.share(torch.zeros(3, dtype=torch.float64))
    x = np.ones((2 * ranks, 4))
    net.half()
    with pytest.raises(ValueError, match=words):
        synk.distribute()
    net.double()
    values = before.astype(np.float16).astype(float)
    synk.distribute()
    net.half()
    for use in (
        lambda: f(x.astype(np.float16)),
        lambda: synk.all_reduce(weights),
        lambda: synk.broadcast(weights, before),
    ):
        with pytest.raises(ValueError, match=words):
            use()
    net.double()
    tensor.data = tensor.data.half()
    with pytest.raises(ValueError, match=words):
        synk.gather(tensor)
    tensor.data = tensor.data.double()
    assert synk.gather(tensor).tolist() == [[0] * 3] * ranks
    assert f(x).shape == (2 * ranks, 3)
    assert by_rank(weights) == [values.tobytes()] * ranks


class RunningSum(torch.nn.Module):
    """A module that replaces its buffer in each call, in place of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = 0.5 * self.total + x.sum(0)
        return self.layer(x)


def test_a_buffer_that_forward_replaces_stays_shared(ranks: int) -> None:
    net = RunningSum()
    inner = torch.nn.Sequential(net)
    with torch.no_grad():
        inner(torch.ones(1, 2))
    synk.share(inner)
    inner(torch.ones(1, 2))  # between share() and distribute()
    f, peek = synk.function(inner, "gather"), synk.function(lambda: net.total * 1, "gather")
    synk.distribute()
    name, x = "float32 buffers of Sequential", np.repeat(np.arange(1.0, ranks + 1, dtype="f4"), 2)[:, None]
    expected = [1.5] * ranks

    def check() -> None:
        assert synk.gather(name).tolist() == [[value] * 2 for value in expected]
        assert peek().reshape(ranks, 2).tolist() == [[value] * 2 for value in expected]

    check()
    for num_slices in (1, 2):
        f(x * np.ones(2, "f4"), num_slices=num_slices)
        for rank, row in enumerate(range(1, ranks + 1)):
            for _ in range(num_slices):
                expected[rank] = 0.5 * expected[rank] + row * (3 - num_slices)
        check()
    later = synk.function(lambda: inner(torch.zeros(1, 2)), "gather")  # each rank has another copy
    f(x * np.ones(2, "f4"))
    synk.distribute()
    later()
    expected = [0.5 * (0.5 * value + 2 * (rank + 1)) for rank, value in enumerate(expected)]
    check()
    f(x * np.ones(2, "f4"))
    synk.broadcast(name)
    expected = [0.5 * expected[0] + 2] * ranks
    check()
    f(x * np.ones(2, "f4"))
    synk.broadcast(name, np.full(2, 7.0, "f4"))
    expected = [7.0] * ranks
    check()


class Exchanging(torch.nn.Module):
    """A module that moves values from buffer to buffer by assignment: a shift, then a swap."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        for name in names:
            self.register_buffer(name, torch.full((2,), float("abcd".index(name) + 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b = self.a
        self.a = self.a + x.sum(0)
        self.c, self.d = self.d, self.c
        return self.layer(x)


@pytest.mark.parametrize("names", [pytest.param("abcd", marks=pytest.mark.slow), "dcba"])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_buffers_that_forward_shifts_or_swaps_are_those_of_torch(
    ranks: int, names: str, num_slices: int
) -> None:
    kind = type(f"Exchanging_{names}_{num_slices}", (Exchanging,), {})  # for a new name of its buffers
    net, plain = synk.share(kind(names)), [Exchanging(names) for _ in range(ranks)]
    f = synk.function(net, "gather")
    synk.distribute()
    random = np.random.default_rng(4)
    for _ in range(3):
        x = random.normal(size=(6 * ranks, 2)).astype("f4")
        f(x, num_slices=num_slices)
        for module, part in zip(plain, np.split(x, ranks), strict=True):
            for values in np.split(part, num_slices):
                module(torch.from_numpy(values))
        expected = [torch.cat(list(module.buffers())).numpy().tobytes() for module in plain]
        assert by_rank(f"float32 buffers of {kind.__name__}") == expected


def test_a_buffer_that_is_replaced_by_one_of_another_shape_is_the_modules_own(ranks: int) -> None:
    net = synk.share(RunningSum())
    f = synk.function(lambda x: setattr(net, "total", torch.ones(len(x))) or net.total.sum(), "sum")
    synk.distribute()
    assert f(np.ones(3 * ranks)) == 3 * ranks, "it works"
    name = "float32 buffers of RunningSum"
    for use in (lambda: synk.gather(name), lambda: synk.broadcast(name, np.zeros(2, "f4"))):
        with pytest.raises(
            ValueError, match=r"total, of \(2,\) .* replaced by one of \(3,\) and .* former shape"
        ):
            use()
    assert f(np.ones(3 * ranks)) == 3 * ranks
    synk.all_reduce(synk.weights(net))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_all_reduce_of_a_buffer_that_one_rank_replaced_by_another_shape(rank: int) -> None:
    """No rank waits for the one that refuses; with float32 on GPUs they would wait until the timeout."""
    with team(2, devices=DEVICES or None, timeout=limit(10)):
        net = synk.share(RunningSum())
        name, weights = "float32 buffers of RunningSum", synk.weights(net)

        def replace(x: torch.Tensor) -> None:
            net.total = torch.ones(int(x[0]), device=net.total.device)

        f = synk.function(replace, None)
        synk.distribute()
        synk.all_reduce(name)
        for _ in range(2):
            f(np.array([3.0, 2.0] if rank == 0 else [2.0, 3.0]))
            with pytest.raises(ValueError, match=r"total, of \(2,\) .* was replaced by one of \(3,\)"):
                synk.all_reduce([weights, name])
        f(np.array([2.0, 2.0]))
        synk.all_reduce([weights, name])
        assert synk.gather(name).tolist() == [[1.0, 1.0]] * 2


@pytest.mark.slow
def test_values_after_a_broadcast_that_one_rank_has_refused() -> None:
    with team(2, devices=DEVICES or None):
        net, tensor = synk.share(RunningSum()), synk.share(torch.arange(3.0))
        name = "float32 buffers of RunningSum"

        def replace(x: torch.Tensor) -> torch.Tensor:
            net.total = torch.ones(int(x[0]), device=net.total.device)
            return tensor.sum() * 0

        f, team_blocks = synk.function(replace, "sum"), session.current_team("").context.blocks
        synk.distribute()
        f(np.array([2.0, 3.0]))
        n_blocks = len(team_blocks)
        for length in (500, 5000):
            with pytest.raises(ValueError, match="was replaced by one of"):
                synk.broadcast([name, tensor], [np.ones(2, "f4"), np.ones(length, "f4")])
            assert [len(value) for value in synk.gather(tensor)] == [length, 3]
            assert synk.get_value(1, tensor).tolist() == [0, 1, 2]
            assert len(team_blocks) == n_blocks


def test_hooks_that_only_this_process_would_run_are_refused(ranks: int) -> None:
    def use(*held: Any) -> None:
        synk.function(lambda held=held: None, None, name="use")
        synk.distribute()

    net = synk.share(make_net(torch.nn.Tanh(), torch.nn.Linear(3, 2)))
    optimizer, plain = sgd(net), torch.zeros(7, requires_grad=True)
    words = "^function 'use' can't go to the ranks: .*{} has hooks, which only this process would run"
    for register in (net[2].weight.register_hook, net[2].weight.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        with pytest.raises(TypeError, match=words.format("parameter '2.weight' of Sequential")):
            use(net)
        with pytest.raises(
            TypeError, match=words.format(r"tensor of shape \(2, 3\) in 'weights of Sequential'")
        ):
            use(optimizer)
        handle.remove()
    handle = plain.register_hook(lambda grad: grad)
    with pytest.raises(TypeError, match=words.format(r"tensor of shape \(7,\)")):
        use(plain)
    handle.remove()
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        with pytest.raises(TypeError, match=words.format("the optimizer SGD")):
            use(optimizer)
        handle.remove()
    use(net, optimizer, plain)


class Counting(torch.optim.SGD):
    """An optimizer with another attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.factor = 3.0


def test_an_optimizer_goes_over_with_all_its_attributes(ranks: int) -> None:
    net, plain = synk.share(make_net()), make_net()
    optimizer, reference = (torch.optim.LBFGS(module.parameters(), max_iter=5) for module in (net, plain))
    counting = Counting(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(counting, 1)

    def fit(module: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (torch.tanh(module(x)) - 0.5).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    f = synk.function(lambda x: fit(net, optimizer, x), None, ["x"], updates=[synk.weights(net)])
    g = synk.function(lambda: torch.tensor([counting.factor, "step" in vars(counting)]), "gather")
    synk.distribute()
    x = np.random.default_rng(5).normal(size=(6, 4))
    for _ in range(2):
        f(x)
        fit(plain, reference, torch.from_numpy(x))
    assert by_rank(synk.weights(net)) == [flat(plain).tobytes()] * ranks
    assert g().reshape(ranks, 2).tolist() == [[3, 1], [3, 0]][:ranks], (
        "the scheduler counts the caller's steps"
    )
    assert scheduler


class Locked(Counting):
    """An optimizer with an attribute that cannot be pickled, after one that refers to the optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.log = [self.zero_grad]
        self.lock = threading.Lock()


class Unlocked(Locked):
    def __getstate__(self) -> Any:
        return {**super().__getstate__(), "factor": self.factor}


def test_an_attribute_of_an_optimizer_that_cannot_go_over_is_named(ranks: int) -> None:
    net = synk.share(make_net())
    optimizer = Locked(net.parameters())

    def use() -> None:
        optimizer.step()

    synk.function(use, None, name="f")
    with pytest.raises(
        TypeError,
        match=r"^function 'f': 'optimizer', which it uses, can't go to the ranks: attribute 'lock' of the "
        r"optimizer Locked can't be pickled: .*lock.*\. Delete it before distribute\(\), or give Locked a ",
    ):
        synk.distribute()
    del optimizer.lock
    other = Unlocked(net.parameters())
    g = synk.function(lambda: torch.tensor([optimizer.factor, other.factor]), "gather")
    synk.distribute()
    assert g().tolist() == [3.0, 3.0] * ranks
    optimizer.param_groups[0]["lock"] = threading.Lock()
    synk.function(use, None, name="f")
    with pytest.raises(
        TypeError, match=r"'optimizer', which it uses, can't go to the ranks: TypeError: [^:]*$"
    ):
        synk.distribute()
    other_one = synk.function(lambda x: x.sum(), "sum")
    synk.distribute()
    assert other_one(np.ones(6)) == 6
    with pytest.raises(TypeError, match="lock"):
        g()


class Watched(torch.nn.Module):
    """A module that counts how often its training mode is read."""

    n_read = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "training":
            Watched.n_read += 1
        return super().__getattribute__(name)


def test_a_call_reads_a_module_of_several_distributes_once(ranks: int) -> None:
    """A program that distributes often, as a notebook does, would make all calls slow otherwise."""
    net = Watched()

    def is_training(x: torch.Tensor) -> torch.Tensor:
        return x * net.training

    first = synk.function(is_training, "gather")
    synk.distribute()
    second = synk.function(is_training, "gather")
    synk.distribute()
    for mode in (False, True, True, False):
        net.train(mode)
        for f in (second, first):
            assert f(np.ones(6)).tolist() == [mode] * 6
    other = synk.function(lambda x: x.sum(), "sum")
    synk.distribute()
    before = Watched.n_read
    assert other(np.ones(6)) == 6
    assert Watched.n_read == before + 1


def test_gradients_that_a_callable_swaps_keep_their_values(ranks: int) -> None:
    """Each lies in the part of the vector that the other one gets."""
    net = synk.share(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(torch.float64))

    def compute(x: torch.Tensor) -> None:
        net.zero_grad()
        net(x).square().sum().backward()

    def swap() -> None:
        first, second = net[0], net[1]
        first.weight.grad, second.weight.grad = second.weight.grad, first.weight.grad
        first.bias.grad, second.bias.grad = None, first.bias.grad

    gradients = synk.grads(net)
    f, g = synk.function(compute, None, updates=[gradients]), synk.function(swap, None, updates=[gradients])
    synk.distribute()
    f(np.ones((6, 3)))
    synk.all_reduce(gradients, "sum")
    values = np.split(synk.get_value(0, gradients), [9, 12, 21])
    g()
    found = synk.gather(gradients)
    assert (found == np.concatenate([values[2], 0 * values[1], values[0], values[1]])).all()


class Doubled(torch.nn.Parameter):
    """A parameter that is doubled where it is used."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.nn.functional.linear else result


def test_ranks_have_parameters_of_the_class_that_the_program_gave_them(ranks: int) -> None:
    net = make_net()
    net[0].weight = Doubled(net[0].weight.data)
    values = np.ones((6, 4))
    expected = net(torch.from_numpy(values)).tolist()
    f = synk.function(synk.share(net), "gather")
    synk.distribute()
    assert f(values).tolist() == expected


def test_attributes_of_a_class_have_the_settings_of_each_call(ranks: int) -> None:
    """Ranks have one class, whose attributes are those that the last distribute() sent."""

    class Holder:
        net = synk.share(make_net())

    def is_training(x: torch.Tensor) -> torch.Tensor:
        return x * Holder.net.training

    first = synk.function(is_training, "gather")
    synk.distribute()
    second = synk.function(is_training, "gather")
    synk.distribute()
    for mode, f in ((True, second), (False, first), (True, first), (False, second), (True, first)):
        Holder.net.train(mode)
        assert f(np.ones(6)).tolist() == [mode] * 6


@pytest.mark.slow
def test_an_optimizer_that_is_an_attribute_of_a_class_gets_the_state_that_is_loaded(ranks: int) -> None:
    net = synk.share(make_net())

    class Holder:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        Holder.optimizer.step()

    first = synk.function(step, None, updates=[synk.weights(net)])
    synk.distribute()
    second = synk.function(step, None, updates=[synk.weights(net)])
    synk.distribute()
    second()
    saved = copy.deepcopy(Holder.optimizer.state_dict())
    for f in (first, second, first):
        f()
        Holder.optimizer.load_state_dict(saved)
        f()
        f()
        assert by_rank(synk.weights(net)) == [flat(net).tobytes()] * ranks


class Rebuilt(torch.nn.Module):
    """A network that is pickled without its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def __reduce__(self) -> Any:
        return Rebuilt, ()


def test_a_module_that_is_pickled_without_its_shared_parameters_is_refused(ranks: int) -> None:
    net = synk.share(Rebuilt())
    synk.function(lambda x: net.layer(x) + 1, "gather", name="rebuilding")
    good = synk.function(lambda x: x.sum(), "sum")
    message = r"'rebuilding'.*'net'.*__reduce__ or __getstate__ of Rebuilt .* 'weight' of Linear"
    with pytest.raises(TypeError, match=message):
        synk.distribute()
    synk.distribute()
    assert good(np.ones(6)) == 6


class Options(dict[str, Any]):
    """Options that are attributes, too; it has None for every other attribute."""

    __getattr__ = dict.get


def test_an_optimizer_may_have_options_with_any_attribute(ranks: int) -> None:
    """They are no tensor, though they have a `data_ptr`, and go to the ranks as other attributes do."""
    net = synk.share(make_net())
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.options = optimizer.param_groups[0]["options"] = Options(factor=3)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return x * optimizer.options["factor"] * optimizer.param_groups[0]["options"]["factor"]

    f = synk.function(compute, "gather")
    synk.distribute()
    for learning_rate in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = learning_rate
        assert f(np.ones(6)).tolist() == [9] * 6


def test_an_optimizer_of_a_parameter_that_is_not_shared_is_a_warning(ranks: int) -> None:
    net, scale = synk.share(make_net()), torch.nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
    message = r"1 of 3 parameters of the optimizer SGD are not shared, one of shape \(7,\) for instance"
    synk.function(optimizer.zero_grad, None, updates=[synk.grads(net)])
    with pytest.warns(UserWarning, match=message) as caught:
        synk.distribute()
    assert caught[0].filename == __file__
    synk.share(scale)
    synk.function(optimizer.zero_grad, None, updates=[synk.grads(net)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synk.distribute()
