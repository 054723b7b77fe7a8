"""Training functions: gradient, all_reduce and update as one command to the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor

from lockstep.synk.extensions import TrainingStep, listed, make_step
from lockstep.synk.rows import choose
from lockstep.synk.session import function


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    rule: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> TrainingStep:
    """Return a function step(x, y, batch=None, num_slices=1) that trains on all ranks and returns the loss.

    Call distribute() before the first step. A step is exact for any number of rows: the ranks' gradients are
    weighted by their rows.

    Args:
        loss: Scalar expression, the mean over rows.
        x, y: Variables of the loss, or lists of them.
        rule: Rule of lockstep.synk.extensions.updates, called with `arguments` and `options`.
    """
    grad_updates, param_updates, gradient = rule(loss, params, *arguments, **options)
    compute = function([*listed(x), *listed(y)], loss, updates=grad_updates, name="gradient")
    update = function([], updates=param_updates, name="update")
    return make_step(compute, gradient, update)


def make_train_function_theano(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    rule: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> TrainingStep:
    """Return step(x, y, batch=None) on arrays, which trains in one process with PyTensor only."""
    grad_updates, param_updates, _ = rule(loss, params, *arguments, **options)
    compute = pytensor.function([*listed(x), *listed(y)], loss, updates=grad_updates)
    update = pytensor.function([], updates=param_updates)

    def step(x: Any, y: Any, batch: Any = None) -> Any:
        arrays = [*listed(x), *listed(y)]
        result = compute(*(array[choose(batch, len(array), "batch")] for array in arrays))
        update()
        return result

    return step
