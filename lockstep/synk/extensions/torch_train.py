"""Training functions for modules of torch: gradient, all_reduce and update as one command to the ranks."""

from collections.abc import Callable

import torch

from lockstep.synk.distributing import function
from lockstep.synk.extensions.steps import Step, make_step
from lockstep.synk.programs import sharing


def make_train_function(
    module: torch.nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> Step:
    """A function step(x, y, batch=None, num_slices=1) -> loss that trains on all ranks. Call it after
    distribute().

    module: is shared (lockstep.synk.share) unless it is already. loss: of module(x) and y, the mean over
    rows. optimizer: of the module's parameters. A step is exact for any number of rows: ranks' gradients
    count by their rows.
    """
    sharing.share(module)
    weights, gradients = sharing.vectors(module, "make_train_function()")

    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(module(x), y)
        found.backward()  # type: ignore[no-untyped-call]
        return found

    def descend() -> None:
        optimizer.step()

    compute = function(gradient, "avg", updates=[gradients], name="gradient")
    return make_step(compute, gradients, function(descend, None, updates=[weights], name="update"))
