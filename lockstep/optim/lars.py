"""Layer-wise adaptive rates for large batches: You, Gitman, Ginsburg 2017, arXiv 1708.03888."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.optim.contract import MomentumOptimizer, momentum_of

if TYPE_CHECKING:
    import torch

    from lockstep.config import Config


class LARS(MomentumOptimizer):
    """SGD with momentum in which every weight tensor has a rate of its own, set by its gradient's size.

        v = m v + r (g + d w)      w = w - rate v      r = trust |w| / (|g| + d |w|)

    r is 1 for parameters of one dimension (biases, gains of norms) and where |w| or |g| is 0. The paper has
    the rate inside v, as Caffe does; here it is outside, as in torch's SGD: the same while the rate stays.
    trust is the paper's eta.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"bias_rate": 1.0, "trust": 0.001}
    inexact = "lars's update is not linear in the gradient"

    def make(
        self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]
    ) -> "torch.optim.Optimizer":
        import torch

        scaled = [{**group, "decay": group["weight_decay"], "weight_decay": 0.0, **args} for group in groups]
        optimizer = torch.optim.SGD(scaled, config.learning_rate, momentum_of(config), fused=True)
        optimizer.register_step_pre_hook(_scale_gradients)
        return optimizer


def _scale_gradients(optimizer: "torch.optim.Optimizer", args: Any, keywords: Any) -> None:
    """Makes each gradient r (g + d w), with which SGD then steps. Never waits for the device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _scale(parameter.grad, parameter.detach(), group["decay"], group["trust"])


def _scale(gradient: "torch.Tensor", weight: "torch.Tensor", decay: float, trust: float) -> None:
    size = gradient.norm()
    gradient.add_(weight, alpha=decay)
    if weight.dim() > 1:
        length = weight.norm()
        ratio = trust * length / (size + decay * length)
        gradient.mul_(ratio.where((length > 0) & (size > 0), ratio.new_ones(())))
