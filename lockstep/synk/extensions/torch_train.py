"""Training functions for modules of torch: gradient, all_reduce and update as one command to the ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.synk import sharing
from lockstep.synk.extensions import TrainingStep, make_step
from lockstep.synk.session import current_team, function


def make_train_function(
    module: torch.nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> TrainingStep:
    """Return a function step(x, y, batch=None, num_slices=1, learning_rate=None) that trains on all ranks.

    Call distribute() before the first step. A step returns the loss, and is exact for any number of rows:
    the ranks' gradients are weighted by their rows. A learning_rate replaces that of all parameter groups
    from this step on, even if the step fails; schedulers in this process work, too.

    Args:
        module: Shared by lockstep.synk.share if it is not yet.
        loss: Function of module(x) and y that returns the mean over rows.
        optimizer: Optimizer of the module's parameters. A step is an error if a parameter of the optimizer
            that the module lacks has a gradient.

    Raises:
        ValueError: The optimizer has no parameter of the module.
    """
    team = current_team("make_train_function()")
    sharing.share(team, module)
    weights, gradients = sharing.vectors(team, module, "make_train_function()")

    own = {id(parameter) for parameter in module.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in trained if id(p) not in own]
    if len(others) == len(trained):
        raise ValueError(
            f"make_train_function(): the optimizer has no parameter of {type(module).__name__}, so no step "
            "would train it. Make it from module.parameters()"
        )

    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mean_loss = loss(module(x), y)
        mean_loss.backward()  # type: ignore[no-untyped-call]
        shapes = [tuple(parameter.shape) for parameter in others if parameter.grad is not None]
        if shapes:
            raise ValueError(  # each rank would update it by its own gradient
                f"a training step: the optimizer's parameter of shape {shapes[0]} has a gradient, but is not "
                f"in {type(module).__name__}. Make the step of a module that has all parameters"
            )
        return mean_loss

    def descend() -> None:
        optimizer.step()

    compute = function(gradient, "avg", updates=[gradients], name="gradient")
    step = make_step(compute, gradients, function(descend, None, updates=[weights], name="update"))

    def step_at(
        x: Any, y: Any, batch: Any = None, num_slices: int = 1, learning_rate: float | None = None
    ) -> Any:
        if learning_rate is not None:
            _set_learning_rate(optimizer, _checked(learning_rate))
        return step(x, y, batch, num_slices)

    return step_at


def _checked(learning_rate: Any) -> float:
    """Return a number of its own, because the next one is written into a group's tensor."""
    value = np.asarray(learning_rate)
    if value.shape or value.dtype.kind not in "iuf" or not 0 <= value < np.inf:
        raise ValueError(f"a training step: learning_rate={learning_rate!r} is not a number from 0 on")
    return float(value)


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
