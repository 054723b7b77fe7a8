"""SGD with momentum, as theano_alexnet does it, or with Nesterov's (Sutskever et al. 2013)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.optim.contract import MomentumOptimizer, momentum_of

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.optim.fused import FusedSGD


class SGD(MomentumOptimizer):
    """torch keeps v = m v + g and steps by the rate times v; theano_alexnet keeps v = m v - rate g.

    They are the same as long as the rate stays; when it falls, torch's step falls with it at once. Biases
    learn twice as fast, as in cuda-convnet, Caffe and theano_alexnet.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"bias_rate": 2.0}

    def make(self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]) -> "FusedSGD":
        from lockstep.optim.fused import FusedSGD

        return FusedSGD(groups, momentum_of(config), config.use_nesterov_momentum, **args)
