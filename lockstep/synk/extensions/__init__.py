"""Extensions for training: update rules, and steps of gradient, all_reduce and update as one command."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.synk.functions import CallArguments, Function
from lockstep.synk.session import distributed_team
from lockstep.synk.slots import make_all_reduce

TrainingStep = Callable[..., Any]


def make_step(compute: Function, gradient: Any, update: Function) -> TrainingStep:
    """Return a function step(x, y, batch=None, num_slices=1) that returns the result of `compute`.

    Args:
        compute: Function that writes `gradient`; x and y are its inputs, or lists of them.
        gradient: Shared variable, averaged over the ranks weighted by their rows.
        update: Function that reads `gradient`, sent by the same distribute() as `compute`.
    """
    compiled = False

    def step(x: Any, y: Any, batch: Any = None, num_slices: int = 1) -> Any:
        nonlocal compiled
        team = distributed_team("a training step")
        with team.exclusive_call("a training step"):
            # `first` brings the settings of its own group only: `update` would lack its optimizer's state.
            if update.settings_group not in (0, compute.settings_group):
                raise ValueError(
                    f"a training step: {compute.name!r} and {update.name!r} were sent by two calls of "
                    "distribute(). Create both again, then call distribute() once"
                )
            first = compute.prepare(
                CallArguments([*listed(x), *listed(y)], batch=batch, num_slices=num_slices)
            )
            gradients = team.registry.find(gradient, "a training step")
            # Without results, which would overwrite those of `first`.
            last = update.prepare(CallArguments(output_subset=[]))
            steps = (
                first,
                make_all_reduce(gradients, "avg", by_rows=True),
                replace(last, settings=None),  # `first` has brought them, and its callable may change them
            )
            try:
                if compiled:
                    parts, _, _ = team.ask("a training step", *steps)
                else:  # one by one, so that the workers find in the cache what this process compiled
                    parts, _, _ = [team.ask("a training step", part, own_first=True)[0] for part in steps]
                    compiled = True
            finally:
                compute.accept_bindings()
                update.accept_bindings()
            return compute.finish(first, parts)

    return step


def listed(given: Any) -> list[Any]:
    """Return a list of inputs for one input or several. A list of numbers alone is one input."""
    if not isinstance(given, list | tuple):
        return [given]
    several = not given or any(getattr(entry, "ndim", 0) for entry in given)
    return list(given) if several else [given]
