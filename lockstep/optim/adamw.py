"""AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101. Weights decay by the rate times weight_decay."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.errors import UserError
from lockstep.optim.contract import Optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lockstep.config import Config
    from lockstep.optim.contract import StateStorage, TorchOptimizer
    from lockstep.optim.fused import FusedAdamW

_STEPS = "steps"  # number of steps of each parameter; in checkpoints, alike in all trainers


class AdamW(Optimizer):
    """AdamW, whose state is two averages of each parameter's gradients and a count of its steps."""

    defaults: ClassVar[Mapping[str, Any]] = {"bias_rate": 1.0, "betas": (0.9, 0.999), "eps": 1e-8}
    inexact = "adamw's update is not linear in the gradient"

    def check(self, args: Mapping[str, Any]) -> None:
        betas = args["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas are two numbers from 0 to below 1, not {list(betas)}")
        super().check(args)

    def states(self, config: "Config") -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def make(self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]) -> "FusedAdamW":
        from lockstep.optim.fused import FusedAdamW

        return FusedAdamW(groups, **args)

    def bind(
        self,
        optimizer: "TorchOptimizer",
        named: "Sequence[tuple[str, torch.Tensor]]",
        arena: "StateStorage",
        config: "Config",
    ) -> None:
        arena.local[_STEPS] = arena.flat.new_zeros(len(named))
        for (name, parameter), step in zip(named, arena.local[_STEPS], strict=True):
            averages = {kind: arena.state_of(kind, name) for kind in self.states(config)}
            optimizer.state[parameter] = {"step": step, **averages}
