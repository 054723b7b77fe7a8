"""SGD with momentum, as theano_alexnet does it, or with Nesterov's (Sutskever et al. 2013)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.optim.contract import MomentumOptimizer, momentum_of

if TYPE_CHECKING:
    import torch

    from lockstep.config import Config


class SGD(MomentumOptimizer):
    """torch keeps v = m v + g and steps by the rate times v; theano_alexnet keeps v = m v - rate g.

    They are the same as long as the rate stays; when it falls, torch's step falls with it at once. Biases
    learn twice as fast, as in cuda-convnet, Caffe and theano_alexnet.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"bias_rate": 2.0}

    def make(
        self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]
    ) -> "torch.optim.Optimizer":
        import torch

        # fused: one pass over the weights; on a CPU many times faster than a loop over operations
        rate, nesterov = config.learning_rate, config.use_nesterov_momentum
        return torch.optim.SGD(groups, rate, momentum_of(config), nesterov=nesterov, fused=True, **args)
