"""Layer-wise adaptive rates for large batches: You, Gitman, Ginsburg 2017, arXiv 1708.03888."""

from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    """SGD with momentum in which every weight tensor has a rate of its own, set by its gradient's size.

        v = m v + r (g + d w)      w = w - rate v      r = trust |w| / (|g| + d |w|)

    r is 1 for parameters of one dimension (biases, gains of norms) and where |w| or |g| is 0. The paper has
    the rate inside v, as Caffe does; here it is outside, as in torch's SGD: the same while the rate stays.

    params: groups with 'lr', 'momentum', 'weight_decay', 'trust'. The state is 'momentum_buffer'.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have gradients. Never waits for the device."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, decay = parameter.grad, group["weight_decay"]
        assert gradient is not None
        update = gradient.add(parameter, alpha=decay)
        if parameter.dim() > 1:
            weight, size = parameter.norm(), gradient.norm()
            ratio = group["trust"] * weight / (size + decay * weight)
            update *= torch.where((weight > 0) & (size > 0), ratio, 1.0)
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            update = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
        parameter.sub_(update * group["lr"])
