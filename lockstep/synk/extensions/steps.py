"""A training step as one command to the ranks: gradient, all_reduce and update."""

from collections.abc import Callable
from typing import Any

from lockstep.synk.allreduce import make_all_reduce
from lockstep.synk.functions import Function
from lockstep.synk.session import distributed_team

Step = Callable[..., Any]


def make_step(compute: Function, gradient: Any, update: Function) -> Step:
    """A function step(x, y, batch=None, num_slices=1) -> what compute gives. x, y: inputs, or lists of them.

    gradient: the shared variable that `compute` writes and `update` reads. Ranks count by their rows in it.
    """
    compiled = False

    def step(x: Any, y: Any, batch: Any = None, num_slices: int = 1) -> Any:
        nonlocal compiled
        team = distributed_team("a training step")
        with team.lock:
            first = compute.prepare([*listed(x), *listed(y)], {}, None, batch, None, num_slices)
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


def listed(given: Any) -> list[Any]:
    """A list or tuple as a list; one thing as a list of one. Lists of numbers are data, and stay."""
    several = isinstance(given, list | tuple) and all(hasattr(entry, "ndim") for entry in given)
    return list(given) if several else [given]
