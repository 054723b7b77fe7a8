"""Training functions: gradient, all_reduce and update as one command to the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor

from lockstep.synk.allreduce import make_all_reduce
from lockstep.synk.distributing import function
from lockstep.synk.session import distributed_team

Step = Callable[..., Any]


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
    compute = function([*_listed(x), *_listed(y)], loss, updates=grad_updates, name="gradient")
    update = function([], updates=param_updates, name="update")
    compiled = False

    def step(x: Any, y: Any, batch: Any = None, num_slices: int = 1) -> Any:
        nonlocal compiled
        team = distributed_team("a training step")
        with team.lock:
            first = compute.prepare([*_listed(x), *_listed(y)], {}, None, batch, None, num_slices)
            gradients = team.known.find(gradient, "a training step")
            steps = (
                first,
                make_all_reduce(gradients, "avg", by_rows=True),
                update.prepare([], {}, None, None, None, 1),
            )
            if compiled:
                parts, _, _ = team.ask("a training step", *steps)
            else:  # apart, so that the others find compiled what this process has
                parts, _, _ = [team.ask("a training step", part, own_first=True)[0] for part in steps]
                compiled = True
            return compute.finish(first, parts)

    return step


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
    compute = pytensor.function([*_listed(x), *_listed(y)], loss, updates=grad_updates)
    update = pytensor.function([], updates=param_updates)

    def step(x: Any, y: Any, batch: Any = None) -> Any:
        arrays = [*_listed(x), *_listed(y)]
        found = compute(*(arrays if batch is None else [array[batch] for array in arrays]))
        update()
        return found

    return step


def _listed(given: Any) -> list[Any]:
    """A list or tuple as a list; one thing as a list of one. Lists of numbers are data, and stay."""
    several = isinstance(given, list | tuple) and all(hasattr(entry, "ndim") for entry in given)
    return list(given) if several else [given]
