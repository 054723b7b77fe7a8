"""Stochastic gradient descent with momentum (Sutskever et al. 2013), as torch's SGD does it."""

from collections import defaultdict
from typing import Any

import torch
from torch.optim.sgd import sgd


class FusedSGD:
    """torch's own step, in one pass over all tensors, without the class around it.

    torch.optim.Optimizer loads torch's compiler when the first one is made, which is more than a third of the
    time that a trainer takes to start (docs/decisions.md).

    groups: with 'params', 'lr' and 'weight_decay'. The state of a parameter is its 'momentum_buffer'.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, nesterov: bool) -> None:
        self.param_groups = groups
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        self._momentum, self._nesterov = momentum, nesterov

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters that have gradients. Never waits for the device."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            sgd(
                trained,
                [parameter.grad for parameter in trained],
                [self.state[parameter]["momentum_buffer"] for parameter in trained if self._momentum],
                fused=True,
                weight_decay=group["weight_decay"],
                momentum=self._momentum,
                lr=group["lr"],
                dampening=0.0,
                nesterov=self._nesterov,
                maximize=False,
            )

    def zero_grad(self) -> None:
        """Forgets the gradients, so that the next ones need not be added to zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
