"""Training functions: gradient, all_reduce and update as one command to the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor

from lockstep.synk.distributing import function
from lockstep.synk.extensions.steps import Step, listed, make_step


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    rule: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Step:
    """A function step(x, y, batch=None, num_slices=1) -> loss that trains on all ranks. Call it after
    distribute().

    loss: a scalar, the mean over rows. x, y: its variables, or lists of them. rule: one of
    lockstep.synk.extensions.updates, called with arguments and options. A step is exact for any number of
    rows: ranks' gradients count by their rows.
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
) -> Step:
    """The same in one process, by PyTensor alone: step(x, y, batch=None) on arrays."""
    grad_updates, param_updates, _ = rule(loss, params, *arguments, **options)
    compute = pytensor.function([*listed(x), *listed(y)], loss, updates=grad_updates)
    update = pytensor.function([], updates=param_updates)

    def step(x: Any, y: Any, batch: Any = None) -> Any:
        arrays = [*listed(x), *listed(y)]
        found = compute(*(arrays if batch is None else [array[batch] for array in arrays]))
        update()
        return found

    return step
