"""What a program changes after distribute() in what a callable uses is noticed, and nothing else is."""

import argparse
import enum
import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import synk_teams
import torch
from synk_teams import team

import lockstep.synk as synk
from lockstep.synk.extensions import torch_train

X = np.ones((4, 2), np.float32)
Case = tuple[Callable[..., Any], Callable[[], Any]]  # a callable, and a change of what it uses


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    with team(2):
        yield


def a_default_of_a_class_that_an_attribute_hides() -> Case:
    class Scaled:
        beta = 1.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * self.beta

    scaled = Scaled()
    return scaled, lambda: setattr(scaled, "beta", 5.0)


def a_default_of_a_module_that_an_attribute_hides() -> Case:
    class Scaled(torch.nn.Module):
        beta = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * self.beta

    scaled = Scaled()
    return scaled, lambda: setattr(scaled, "beta", 5.0)


def an_attribute_of_a_base_that_a_subclass_hides() -> Case:
    class Base:
        beta = 1.0

    class Scaled(Base):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * self.beta

    return Scaled(), lambda: setattr(Scaled, "beta", 5.0)


def a_method_that_an_attribute_hides() -> Case:
    class Scale:
        def get(self) -> float:
            return 1.0

    scale = Scale()
    return lambda x: x.sum() * scale.get(), lambda: setattr(scale, "get", lambda: 5.0)


def a_slot() -> Case:
    @dataclass(slots=True)
    class Options:
        beta: float = 1.0

    options = Options()
    return lambda x: x.sum() * options.beta, lambda: setattr(options, "beta", 5.0)


def an_argument_of_the_command_line() -> Case:
    args = argparse.Namespace(beta=1.0)
    return lambda x: x.sum() * args.beta, lambda: setattr(args, "beta", 5.0)


def a_namespace() -> Case:
    options = types.SimpleNamespace(beta=1.0)
    return lambda x: x.sum() * options.beta, lambda: setattr(options, "beta", 5.0)


def a_dictionary_with_attributes() -> Case:
    class Options(dict[str, Any]):
        __getattr__ = dict.get

    options = Options(beta=1.0)
    return lambda x: x.sum() * options.beta, lambda: options.update(beta=5.0)


def entries_with_other_keys() -> Case:
    class Phase(enum.Enum):
        TRAIN = 1

    rates = {Phase.TRAIN: 1.0, ("a", 1): 1.0}
    return lambda x: x.sum() * rates[Phase.TRAIN], lambda: rates.update({Phase.TRAIN: 5.0})


def an_entry_of_a_deque() -> Case:
    values = deque([1.0])
    return lambda x: x.sum() * values[0], lambda: values.__setitem__(0, 5.0)


def an_attribute_of_a_function() -> Case:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * scaled.beta  # type: ignore[attr-defined, no-any-return]

    scaled.beta = 1.0  # type: ignore[attr-defined]
    return scaled, lambda: setattr(scaled, "beta", 5.0)


def a_variable_of_a_constructor() -> Case:
    beta = 1.0

    class Scaled:
        def __init__(self, x: torch.Tensor) -> None:
            self.total = x.sum() * beta

    def change() -> None:
        nonlocal beta
        beta = 5.0

    return lambda x: Scaled(x).total, change


def _special(name: str) -> Any:
    """Return an object with a special method that returns its attribute `beta`."""

    def method(self: Any, *args: Any) -> Any:
        return iter([self.beta]) if name == "__iter__" else self.beta

    kind: Any = type("Special", (), {name: method, "__exit__": lambda *args: None, "__module__": __name__})
    made = kind()
    made.beta = 1.0
    return made


def an_attribute_of_a_context() -> Case:
    context = _special("__enter__")

    def scaled(x: torch.Tensor) -> torch.Tensor:
        with context as beta:
            return x.sum() * beta  # type: ignore[no-any-return]

    return scaled, lambda: setattr(context, "beta", 5.0)


def an_attribute_of_an_iterator() -> Case:
    each = _special("__iter__")
    return lambda x: x.sum() * sum(each), lambda: setattr(each, "beta", 5.0)


def an_attribute_of_an_operator() -> Case:
    scale = _special("__mul__")
    return lambda x: x.sum() * (scale * 1.0), lambda: setattr(scale, "beta", 5.0)


def a_variable_of_a_cached_function() -> Case:
    beta = 1.0

    @functools.lru_cache
    def scale() -> float:
        return beta

    def change() -> None:
        nonlocal beta
        beta = 5.0
        scale.cache_clear()

    return lambda x: x.sum() * scale(), change


def a_variable_of_a_hook() -> Case:
    beta = 1.0
    net = torch.nn.Sequential(torch.nn.Identity())
    net[0].register_forward_hook(lambda module, args, output: output * beta)

    def change() -> None:
        nonlocal beta
        beta = 5.0

    return lambda x: net(x).sum(), change


def an_attribute_of_an_optimizer() -> Case:
    class Ascent(torch.optim.SGD):
        beta = 1.0

        def scale(self) -> float:
            return self.beta

    optimizer = Ascent([torch.nn.Parameter(torch.ones(1), requires_grad=False)], lr=0.1)
    return lambda x: x.sum() * optimizer.scale(), lambda: setattr(optimizer, "beta", 5.0)


def a_variable_of_a_module_that_is_imported_within(monkeypatch: pytest.MonkeyPatch) -> Case:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        from synk_teams import MODE

        return x.sum() * len(MODE)

    return scaled, lambda: monkeypatch.setattr(synk_teams, "MODE", "FAST_RUN")


def a_partial_method() -> Case:
    class Scaled:
        def __init__(self) -> None:
            self.beta = 1.0

        def scale(self, factor: float) -> float:
            return self.beta * factor

        once = functools.partialmethod(scale, factor=1.0)

    scaled = Scaled()
    return lambda x: x.sum() * scaled.once(), lambda: setattr(scaled, "beta", 5.0)


def a_layer_of_a_module_that_is_not_shared() -> Case:
    teacher = torch.nn.Sequential(torch.nn.Linear(2, 1).requires_grad_(False))
    return lambda x: teacher(x).sum(), lambda: teacher.__setitem__(0, torch.nn.Linear(2, 1))


def a_builtin_function() -> Case:
    act = torch.tanh

    def change() -> None:
        nonlocal act
        act = torch.relu

    return lambda x: act(x).sum(), change


def an_attribute_of_a_layer_of_torch() -> Case:
    dropout = torch.nn.Dropout(1.0)
    return lambda x: dropout(x).sum(), lambda: setattr(dropout, "p", 0.5)


def a_whole_number_of_a_layer_of_torch() -> Case:
    dropout = torch.nn.Dropout(0)
    return lambda x: dropout(x).sum(), lambda: setattr(dropout, "p", 0.5)


CHANGES = [each for name, each in list(globals().items()) if name.startswith(("a_", "an_", "entries_"))]
REFUSED = (a_builtin_function, a_method_that_an_attribute_hides, a_layer_of_a_module_that_is_not_shared)


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_a_change_after_distribute_is_noticed(
    make: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other rank would compute with the former value, and no result would say so."""
    function, change = make(*[monkeypatch] * ("within" in make.__name__))
    f = synk.function(function, "sum")
    synk.distribute()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(X)
        f(X)
    change()
    kind = ValueError if make in REFUSED else UserWarning
    for _ in range(2):
        with pytest.raises(kind, match="than at distribute"), warnings.catch_warnings():
            warnings.simplefilter("error")
            f(X)


class Trainer:
    """A program's state in an object: some of it is of callables, some of the main loop, some of both."""

    def __init__(self) -> None:
        self.net = synk.share(torch.nn.Linear(2, 1))
        self.optimizer: Any = None
        self.step, self.mean, self.last, self.n = 0, 0.0, None, 0

    def restart(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1 * (self.n + 1))
        self.n = self.n + 1

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.sum()
        self.net.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()

    def rate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.optimizer.param_groups[0]["lr"] * float(self.last)])


def test_what_a_callable_names_itself_is_found_beside_a_large_network() -> None:
    options = types.SimpleNamespace(beta=1.0)
    teacher = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(1200)])
    f = synk.function(lambda x: (teacher(x) * options.beta).sum(), "sum")
    synk.distribute()
    f(X)
    options.beta = 5.0
    with pytest.warns(UserWarning, match=r"'options\.beta' is another float"):
        f(X)


def test_what_a_loss_of_a_step_reads_is_noticed() -> None:
    """The step's own function, of lockstep.synk, holds the loss."""

    class Loss:
        def __init__(self) -> None:
            self.beta = 1.0

        def compute(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (prediction - target).square().mean() * self.beta

    loss, net = Loss(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch_train.make_train_function(net, loss.compute, optimizer)
    synk.distribute()
    step(X, X)
    loss.beta = 5.0
    with pytest.warns(UserWarning, match=r"'self\.beta' is another float") as warned:
        step(X, X)
    assert warned[0].filename == __file__


def test_what_one_callable_assigns_another_may_read() -> None:
    """All ranks have it, and the counters of the main loop are no method of an optimizer."""
    trainer = Trainer()
    restart, compute = synk.function(trainer.restart), synk.function(trainer.compute, "avg")
    rate, update = synk.function(trainer.rate, "gather"), synk.function(trainer.update)
    synk.distribute()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 2):
            restart()
            trainer.mean = float(compute(X))
            update()
            trainer.step += 1
            assert rate(X).tolist() == pytest.approx([0.1 * n * 4] * 2)
    trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'self\.optimizer' is another SGD"):
        update()
    restart()
    update()


def test_what_a_callable_may_assign_and_has_not_is_noticed() -> None:
    first: Any = 1.0

    class Counter:
        value = first

    def assign(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            Counter.value = -1.0
        return x.sum()

    f = synk.function(assign, "sum")
    g = synk.function(lambda x: x.sum() * Counter.value, "sum")
    synk.distribute()
    Counter.value = 5.0
    f(X)
    with pytest.warns(UserWarning, match=r"'Counter\.value' is another float"):
        g(X)
    f(-X)
    assert g(X) == -8


def test_a_statement_that_is_executed_again_changes_nothing() -> None:
    def define() -> tuple[Any, ...]:
        def scaled(x: torch.Tensor, factor: float = 2.0, sizes: tuple[int, ...] = (1, 2)) -> torch.Tensor:
            return x * factor * sizes[0]

        @functools.lru_cache
        def cached() -> float:
            return 1.0

        values = float("1.5"), np.float64("2.5"), torch.device("cpu"), (int("2"), ("a",))
        return scaled, cached, *values

    scaled, cached, number, other, device, shape = define()

    def compute(x: torch.Tensor) -> torch.Tensor:
        return scaled(x.to(device)).sum() * cached() * number * other * len(shape)

    f = synk.function(compute, "sum")
    synk.distribute()
    before = f(X)
    scaled, cached, number, other, device, shape = define()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f(X) == before
