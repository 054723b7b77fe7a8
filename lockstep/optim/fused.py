"""torch's own steps, in one pass over all tensors, without torch.optim's classes.

torch.optim.Optimizer imports torch's compiler when the first one is made, which takes more than a third of a
trainer's start (docs/decisions/training.md, N-2).
"""

from collections import defaultdict
from typing import Any

import torch
from torch.optim.sgd import sgd


class Fused:
    """An optimizer's parameters and state, in torch.optim's form.

    Attributes:
        param_groups: Groups with 'params', 'lr' and 'weight_decay'.
        state: Parameter to kind of state to tensor.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)

    def step(self) -> None:
        """Update all parameters that have gradients, without waiting for the device."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Release the gradients, so that the next ones need not be added to zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _states(self, parameters: list[torch.Tensor], kind: str) -> list[torch.Tensor]:
        return [self.state[parameter][kind] for parameter in parameters]


def _trained(group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters that have gradients, and their gradients."""
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    return trained, [parameter.grad for parameter in trained]


class FusedSGD(Fused):
    """SGD with momentum (Sutskever et al. 2013). The state of a parameter is its 'momentum_buffer'."""

    def __init__(self, groups: list[dict[str, Any]], momentum: float, nesterov: bool) -> None:
        super().__init__(groups)
        self.momentum, self.nesterov = momentum, nesterov

    def step(self) -> None:
        for group in self.param_groups:
            self._step(group, group["weight_decay"])

    @torch.no_grad()
    def _step(self, group: dict[str, Any], weight_decay: float) -> None:
        trained, gradients = _trained(group)
        momenta = self._states(trained, "momentum_buffer") if self.momentum else []
        self.update(trained, gradients, momenta, group["lr"], weight_decay)

    def update(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        momenta: list[torch.Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        """Update any tensors or parts of tensors. The caller disables gradients.

        Args:
            momenta: One for each weight; empty without momentum.
        """
        sgd(
            list(weights),
            list(gradients),
            list(momenta),
            fused=True,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
        )


class FusedLARS(FusedSGD):
    """SGD with momentum after scaling each tensor's gradient (lars.py).

    Args:
        groups: May have 'norms': see Optimizer.needs_norms.
        trust: The paper's eta.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, trust: float) -> None:
        super().__init__(groups, momentum, nesterov=False)
        self._trust = trust

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            known = group.get("norms")
            for parameter, gradient in zip(*_trained(group), strict=True):
                norms = known.get(parameter) if known is not None else _norms(parameter)
                _scale(gradient, parameter.detach(), group["weight_decay"], self._trust, norms)
            self._step(group, 0.0)


def _norms(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the norms of gradient and weight, or None for a parameter that is not scaled."""
    if parameter.dim() < 2 or parameter.grad is None:
        return None
    return parameter.grad.norm(), parameter.detach().norm()


def _scale(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    decay: float,
    trust: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Replace a gradient g by r (g + d w), with which SGD then steps. Never waits for the device."""
    gradient.add_(weight, alpha=decay)
    if norms:
        size, length = norms
        ratio = trust * length / (size + decay * length)
        gradient.mul_(ratio.where((length > 0) & (size > 0), ratio.new_ones(())))


class FusedAdamW(Fused):
    """AdamW (Loshchilov and Hutter 2019). State: 'step', a scalar, 'exp_avg' and 'exp_avg_sq'."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups)
        self._betas, self._eps = betas, eps

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            trained, gradients = _trained(group)
            if not trained:  # all of the group is frozen until `unfreeze_epoch`
                continue
            steps = self._states(trained, "step")
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                trained,
                gradients,
                self._states(trained, "exp_avg"),
                self._states(trained, "exp_avg_sq"),
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=group["weight_decay"],
                eps=self._eps,
                maximize=False,
            )
