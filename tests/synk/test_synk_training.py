"""Update rules and training steps, compared with NumPy over uneven steps, for any number of ranks."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from synk_teams import largest_error, team

import lockstep.synk as synk
from lockstep.synk.extensions import train, updates

SHAPES = [(4, 3), (3,), (3, 2)]
RATE = 0.05


class Reference:
    """The rules in NumPy, on lists of arrays."""

    def __init__(self, params: list[np.ndarray]) -> None:
        self.params = [param.copy() for param in params]
        self.a = [np.zeros_like(param) for param in params]
        self.b = [np.zeros_like(param) for param in params]
        self.t = 0

    def step(self, rule: str, gradients: list[np.ndarray]) -> None:
        self.t += 1
        for i, g in enumerate(gradients):
            self.params[i], self.a[i], self.b[i] = getattr(self, rule)(
                self.params[i], g, self.a[i], self.b[i]
            )

    def sgd(self, p, g, a, b):
        return p - RATE * g, a, b

    def momentum(self, p, g, a, b):
        a = 0.9 * a - RATE * g
        return p + a, a, b

    def nesterov_momentum(self, p, g, a, b):
        a = 0.9 * a - RATE * g
        return p + 0.9 * a - RATE * g, a, b

    def adagrad(self, p, g, a, b):
        a = a + g * g
        return p - RATE * g / np.sqrt(a + 1e-6), a, b

    def rmsprop(self, p, g, a, b):
        a = 0.9 * a + 0.1 * g * g
        return p - RATE * g / np.sqrt(a + 1e-6), a, b

    def adadelta(self, p, g, a, b):
        a = 0.95 * a + 0.05 * g * g
        u = g * np.sqrt(b + 1e-6) / np.sqrt(a + 1e-6)
        return p - RATE * u, a, 0.95 * b + 0.05 * u * u

    def adam(self, p, g, a, b):
        a, b = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g * g
        rate = RATE * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        return p - rate * a / (np.sqrt(b) + 1e-8), a, b

    def adamax(self, p, g, a, b):
        a, b = 0.9 * a + 0.1 * g, np.maximum(0.999 * b, np.abs(g))
        return p - RATE / (1 - 0.9**self.t) * a / (b + 1e-8), a, b


RULES = ["sgd", "momentum", "nesterov_momentum", "adagrad", "rmsprop", "adadelta", "adam", "adamax"]


def network(dtype: str) -> tuple[Any, ...]:
    """A small smooth network: its parameters, inputs and loss, and the same in NumPy with its gradient."""
    random = np.random.default_rng(3)
    values = [random.normal(0, 0.5, shape).astype(dtype) for shape in SHAPES]
    params = [pytensor.shared(value.copy(), name=f"p{i}") for i, value in enumerate(values)]
    x, y = pt.TensorType(dtype, (None, None))("x"), pt.TensorType(dtype, (None, None))("y")
    loss = ((pt.tanh(x.dot(params[0]) + params[1]).dot(params[2]) - y) ** 2).sum(1).mean()
    return values, params, x, y, loss


def gradient(params: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, list[np.ndarray]]:
    hidden = np.tanh(x @ params[0] + params[1])
    error = hidden @ params[2] - y
    back = 2 * error / len(x)
    inner = (back @ params[2].T) * (1 - hidden**2)
    return float((error**2).sum(1).mean()), [x.T @ inner, inner.sum(0), hidden.T @ back]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_rules_over_25_uneven_steps_are_those_of_one_process(size: int) -> None:
    """All in one test, so that there is one team."""
    with team(size):
        made = {}
        for name in RULES:
            values, params, x, y, loss = network("float64")
            rule = getattr(updates, name)
            step = train.make_train_function(loss, params, x, y, rule, learning_rate=RATE)
            made[name] = values, params, step
        synk.distribute()
        for name, (values, params, step) in made.items():
            check_rule(name, values, params, step)


def check_rule(rule: str, values: list[np.ndarray], params: list[Any], step: Any) -> None:
    random = np.random.default_rng(7)
    x, y = random.normal(size=(60, 4)), random.normal(size=(60, 2))
    data = synk.data(x), synk.data(y)
    reference = Reference(values)
    for number in range(25):
        # often not to be divided evenly, or by fewer ranks
        batch = random.integers(0, 60, random.integers(1, 20))
        loss = step(*data, batch=batch, num_slices=1 + number % 3)
        expected, gradients = gradient(reference.params, x[batch], y[batch])
        assert abs(float(loss) - expected) <= 1e-10 * expected, rule
        reference.step(rule, gradients)
    for param, expected_value in zip(params, reference.params, strict=True):
        on_ranks = synk.gather(param)
        assert all(np.array_equal(value, on_ranks[0]) for value in on_ranks), "replicas are bitwise equal"
        assert largest_error(on_ranks[0], expected_value) <= 1e-10, rule


def test_constants_have_the_parameters_dtype_whatever_floatx_is() -> None:
    assert pytensor.config.floatX == "float64"
    for name in [*RULES, "sgd_nonflat"]:
        _, params, _, _, loss = network("float32")
        grad_updates, param_updates, _ = getattr(updates, name)(loss, params, learning_rate=RATE)
        for variable, value in [*grad_updates, *param_updates]:
            assert variable.dtype == value.dtype == "float32", name


def test_the_flat_gradient_stays_in_its_place() -> None:
    """With the rewrites that work in place, its memory is written again, not joined anew."""
    _, params, x, y, loss = network("float64")
    grad_updates, _, flat = updates.sgd(loss, params, RATE)
    mode = pytensor.compile.mode.Mode("py", "fast_run")  # rewritten as for numba, without a compiler
    compute = pytensor.function([x, y], loss, updates=grad_updates, mode=mode)
    before = flat.container.storage[0]
    compute(np.ones((5, 4)), np.ones((5, 2)))
    assert flat.container.storage[0] is before
    assert np.any(before)


def test_one_process_has_the_same_function() -> None:
    values, params, x, y, loss = network("float64")
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        step = train.make_train_function_theano(loss, params, x, y, updates.momentum, RATE)
    random, reference = np.random.default_rng(7), Reference(values)
    rows = random.normal(size=(9, 4)), random.normal(size=(9, 2))
    every, some = slice(None), [0, 3, 8]
    for batch, chosen in ((None, every), (some, some), (4, slice(4)), (np.int64(2), slice(2))):
        step(*rows, batch=batch)
        reference.step("momentum", gradient(reference.params, *(r[chosen] for r in rows))[1])
    assert largest_error(params[0].get_value(), reference.params[0]) <= 1e-10


@pytest.mark.parametrize("name", ["apply_momentum", "apply_nesterov_momentum"])
def test_momentum_on_a_rule_moves_the_parameters_alone(name: str) -> None:
    """Momentum on adam's means and its number of steps would be another rule."""
    values, params, x, y, loss = network("float64")
    grad_updates, param_updates, _ = updates.adam(loss, params, RATE)
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        compute = pytensor.function([x, y], loss, updates=grad_updates)
        update = pytensor.function([], updates=getattr(updates, name)(param_updates, 0.8))
    random, reference = np.random.default_rng(7), Reference(values)
    rows = random.normal(size=(9, 4)), random.normal(size=(9, 2))
    velocities = [np.zeros_like(value) for value in values]
    for _ in range(5):
        compute(*rows)
        update()
        before = reference.params.copy()
        reference.step("adam", gradient(before, *rows)[1])
        for i, old in enumerate(before):
            step = reference.params[i] - old
            velocities[i] = 0.8 * velocities[i] + step
            ahead = 0.8 * velocities[i] + step
            reference.params[i] = old + (velocities[i] if name == "apply_momentum" else ahead)
    for param, expected in zip(params, reference.params, strict=True):
        assert largest_error(param.get_value(), expected) <= 1e-10


def test_parameters_of_several_dtypes_have_no_flat_gradient() -> None:
    a, b = pytensor.shared(np.zeros(2), name="a"), pytensor.shared(np.zeros(2, "float32"), name="b")
    with pytest.raises(TypeError, match="a: float64, b: float32"):
        updates.sgd((a * b).sum(), [a, b], RATE)
