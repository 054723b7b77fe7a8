"""Layer-wise adaptive rates for large batches: You, Gitman, Ginsburg 2017, arXiv 1708.03888."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.optim.contract import MomentumOptimizer, momentum_of

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.optim.fused import FusedLARS


class LARS(MomentumOptimizer):
    """SGD with momentum in which each weight tensor's learning rate is scaled by its norm and its gradient's.

        v = m v + r (g + d w)      w = w - rate v      r = trust |w| / (|g| + d |w|)

    r is 1 for parameters of one dimension (biases, gains of norms) and where |w| or |g| is 0. In the paper
    and in Caffe the rate is inside v; here it is outside, as in torch's SGD, which is the same while the rate
    is constant. trust is the paper's eta.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"bias_rate": 1.0, "trust": 0.001}
    needs_norms = True
    inexact = "lars's update is not linear in the gradient"

    def make(self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]) -> "FusedLARS":
        from lockstep.optim.fused import FusedLARS

        return FusedLARS(groups, momentum_of(config), **args)
