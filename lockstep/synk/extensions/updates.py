"""Update rules for training with all ranks: Lasagne's formulas on one flat gradient.

Every rule returns three things: updates that compute the gradient into a shared variable, updates of the
parameters that read this variable, and the variable, which all ranks average in between (Synkhronos, section
3.3). The gradient of all parameters is one vector, so that one collective is enough.

    grad_updates, param_updates, gradient = updates.adam(loss, params)
    compute = synk.function([x, y], loss, updates=grad_updates)
    update = synk.function([], updates=param_updates)
    synk.distribute()
    loss = compute(x_data, y_data, batch=batch)
    synk.all_reduce(gradient, by_rows=True)
    update()

loss: a scalar expression. params: a list of shared variables of one floating dtype, which is that of all
constants here, whatever floatX is. Rates may be numbers or variables.

Sources: Lasagne, lasagne.updates; momentum: Qian 1999; Nesterov's: Sutskever et al. 2013; adagrad: Duchi et
al. 2011; rmsprop: Tieleman and Hinton 2012; adadelta: Zeiler 2012; adam, adamax: Kingma and Ba 2014.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

Updates = list[tuple[Any, Any]]
Rule = tuple[Updates, Updates, Any]


def sgd(loss: Any, params: Sequence[Any], learning_rate: Any) -> Rule:
    """Return the rule p - rate g."""
    grad_updates, gradient, gradients = _flat_gradient(loss, params)
    return grad_updates, _descend(params, gradients, learning_rate), gradient


def sgd_nonflat(loss: Any, params: Sequence[Any], learning_rate: Any) -> Rule:
    """Return sgd with a separate gradient for each parameter, for comparison; the third result is a list."""
    gradients = [_like(param) for param in params]
    grad_updates = list(zip(gradients, pt.grad(loss, list(params)), strict=True))
    return grad_updates, _descend(params, gradients, learning_rate), gradients


def momentum(loss: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9) -> Rule:
    """Return the rule v = momentum v - rate g; p + v."""
    grad_updates, param_updates, gradient = sgd(loss, params, learning_rate)
    return grad_updates, apply_momentum(param_updates, momentum), gradient


def nesterov_momentum(loss: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9) -> Rule:
    """Return the rule v = momentum v - rate g; p + momentum v - rate g."""
    grad_updates, param_updates, gradient = sgd(loss, params, learning_rate)
    return grad_updates, apply_nesterov_momentum(param_updates, momentum), gradient


def apply_momentum(param_updates: Updates, momentum: Any = 0.9) -> Updates:
    """Add momentum to any updates of parameters. A rule's own variables (adam's means) are left alone."""
    updates, of_params = _separate(param_updates)
    for param, value in of_params:
        velocity = _like(param)
        new = _number(momentum, param) * velocity + value
        updates += [(velocity, new - param), (param, new)]
    return updates


def apply_nesterov_momentum(param_updates: Updates, momentum: Any = 0.9) -> Updates:
    """Add Nesterov's momentum to any updates of parameters; see `apply_momentum`."""
    updates, of_params = _separate(param_updates)
    for param, value in of_params:
        velocity, rate = _like(param), _number(momentum, param)
        new = rate * velocity + value - param
        updates += [(velocity, new), (param, rate * new + value)]
    return updates


def adagrad(loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, epsilon: float = 1e-6) -> Rule:
    """Return the rule a = a + g^2; p - rate g / sqrt(a + epsilon)."""
    grad_updates, gradient, gradients = _flat_gradient(loss, params)
    updates: Updates = []
    for param, grad in zip(params, gradients, strict=True):
        total = _like(param)
        new = total + grad**2
        step = _number(learning_rate, param) * grad / pt.sqrt(new + _number(epsilon, param))
        updates += [(total, new), (param, param - step)]
    return grad_updates, updates, gradient


def rmsprop(
    loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, rho: Any = 0.9, epsilon: float = 1e-6
) -> Rule:
    """Return the rule a = rho a + (1 - rho) g^2; p - rate g / sqrt(a + epsilon)."""
    grad_updates, gradient, gradients = _flat_gradient(loss, params)
    updates: Updates = []
    for param, grad in zip(params, gradients, strict=True):
        mean = _like(param)
        new = _mean(mean, grad**2, _number(rho, param))
        step = _number(learning_rate, param) * grad / pt.sqrt(new + _number(epsilon, param))
        updates += [(mean, new), (param, param - step)]
    return grad_updates, updates, gradient


def adadelta(
    loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, rho: Any = 0.95, epsilon: float = 1e-6
) -> Rule:
    """Return the rule u = g sqrt(d + epsilon) / sqrt(a + epsilon); p - rate u.

    a and d are the running means of g^2 and u^2.
    """
    grad_updates, gradient, gradients = _flat_gradient(loss, params)
    updates: Updates = []
    for param, grad in zip(params, gradients, strict=True):
        mean, steps, decay, small = _like(param), _like(param), _number(rho, param), _number(epsilon, param)
        new = _mean(mean, grad**2, decay)
        step = grad * pt.sqrt(steps + small) / pt.sqrt(new + small)
        updates += [
            (mean, new),
            (param, param - _number(learning_rate, param) * step),
            (steps, _mean(steps, step**2, decay)),
        ]
    return grad_updates, updates, gradient


def adam(
    loss: Any,
    params: Sequence[Any],
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: float = 1e-8,
) -> Rule:
    """Return the rule p - rate sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon).

    m and v are the running means of g and g^2.
    """
    grad_updates, gradient, gradients = _flat_gradient(loss, params)
    first, second = _number(beta1, gradient), _number(beta2, gradient)
    updates, t, rate = _corrected(learning_rate, first)
    rate *= pt.sqrt(_number(1, gradient) - second**t)
    for param, grad in zip(params, gradients, strict=True):
        mean, square = _like(param), _like(param)
        new_mean, new_square = _mean(mean, grad, first), _mean(square, grad**2, second)
        step = rate * new_mean / (pt.sqrt(new_square) + _number(epsilon, param))
        updates += [(mean, new_mean), (square, new_square), (param, param - step)]
    return grad_updates, updates, gradient


def adamax(
    loss: Any,
    params: Sequence[Any],
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: float = 1e-8,
) -> Rule:
    """Return the rule u = max(beta2 u, |g|); p - rate / (1 - beta1^t) m / (u + epsilon).

    m is the running mean of g.
    """
    grad_updates, gradient, gradients = _flat_gradient(loss, params)
    decay = _number(beta2, gradient)
    first = _number(beta1, gradient)
    updates, _, rate = _corrected(learning_rate, first)
    for param, grad in zip(params, gradients, strict=True):
        mean, largest = _like(param), _like(param)
        new_mean = _mean(mean, grad, first)
        new_largest = pt.maximum(decay * largest, abs(grad))
        step = rate * new_mean / (new_largest + _number(epsilon, param))
        updates += [(mean, new_mean), (largest, new_largest), (param, param - step)]
    return grad_updates, updates, gradient


def _flat_gradient(loss: Any, params: Sequence[Any]) -> tuple[Updates, Any, list[Any]]:
    """Return updates that compute the gradient, its vector, and the vector's parts in the parameters' shapes.

    set_subtensor writes in place, while joining the parts would create a new vector in every step.
    """
    dtypes = {param.dtype for param in params}
    if len(dtypes) != 1 or np.dtype(next(iter(dtypes))).kind != "f":
        described = ", ".join(f"{param.name}: {param.dtype}" for param in params)
        raise TypeError(
            f"one flat gradient needs parameters of one floating dtype, not {described or 'none'}"
        )
    shapes = [param.get_value(borrow=True).shape for param in params]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    flat = pytensor.shared(np.zeros(ends[-1], dtypes.pop()), name="flat_gradient")
    bounds = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    filled = flat
    for (first, last), grad in zip(bounds, pt.grad(loss, list(params)), strict=True):
        filled = pt.set_subtensor(filled[first:last], grad.flatten())
    parts = [
        pt.specify_shape(flat[first:last].reshape(shape), param.type.shape)
        for (first, last), shape, param in zip(bounds, shapes, params, strict=True)
    ]
    return [(flat, filled)], flat, parts


def _descend(params: Sequence[Any], gradients: Sequence[Any], learning_rate: Any) -> Updates:
    pairs = zip(params, gradients, strict=True)
    return [(param, param - _number(learning_rate, param) * grad) for param, grad in pairs]


def _like(param: Any) -> Any:
    """Return a shared variable of the parameter's type, set to zero."""
    value = param.get_value(borrow=True)
    return _state(np.zeros(value.shape, value.dtype), shape=param.type.shape)


def _state(value: np.ndarray, **options: Any) -> Any:
    """Return a shared variable that `_separate` knows as a rule's own."""
    variable = pytensor.shared(value, **options)
    variable.tag.state_of_rule = True
    return variable


def _separate(updates: Updates) -> tuple[Updates, Updates]:
    """Return the updates of rules' own variables, and those of parameters."""
    own: Updates = []
    of_params: Updates = []
    for pair in updates:
        (own if hasattr(pair[0].tag, "state_of_rule") else of_params).append(pair)
    return own, of_params


def _mean(old: Any, value: Any, decay: Any) -> Any:
    return decay * old + (_number(1, old) - decay) * value


def _corrected(learning_rate: Any, decay: Any) -> tuple[Updates, Any, Any]:
    """Return the update of a step counter, its next value t, and rate / (1 - decay^t)."""
    counter, one = _state(np.asarray(0, decay.dtype), name="steps"), _number(1, decay)
    t = counter + one
    return [(counter, t)], t, _number(learning_rate, decay) / (one - decay**t)


def _number(value: Any, model: Any) -> Any:
    """Return a number or variable in the dtype of `model`."""
    if isinstance(value, int | float | np.ndarray | np.generic):
        return pt.constant(np.asarray(value, model.dtype))
    return pt.cast(value, model.dtype)
