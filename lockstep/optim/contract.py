"""What an optimizer declares."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lockstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lockstep.config import Config
    from lockstep.optim.fused import Fused

    TorchOptimizer = torch.optim.Optimizer | Fused


def momentum_of(config: "Config") -> float:
    return config.momentum if config.use_momentum else 0.0


class Places(Protocol):
    """Where an optimizer's state lies: an arena, or the pieces of one that a trainer steps on.

    flat: a tensor of the weights' dtype and device. local: counts, one number for each parameter.
    """

    flat: "torch.Tensor"
    local: "dict[str, torch.Tensor]"

    def state_of(self, kind: str, parameter_name: str) -> "torch.Tensor":
        """What it keeps of a parameter, in the parameter's shape."""


class Optimizer(ABC):
    """All that the program knows of an optimizer. It is stateless, and imports torch only in `make`.

    defaults: its arguments besides the keys that all have, numbers or lists of numbers. bias_rate, which all
    have, is the learning rate of biases as a multiple of the weights'. inexact: what makes N trainers differ
    from one with N times the batch, for people; '' where the update is linear in the gradient. kept_keys: of
    the configuration, which a resumed run can't change, for its state would not be there. needs_norms: its
    update is elementwise but for the norms of whole tensors. Where it steps on pieces of tensors, its groups
    have those as 'norms': {piece: (of the gradient, of the weight)}, float64 scalars on the device, of
    parameters that have several dimensions. All others must be elementwise.
    """

    defaults: ClassVar[Mapping[str, Any]]
    inexact: ClassVar[str] = ""
    kept_keys: ClassVar[tuple[str, ...]] = ()
    needs_norms: ClassVar[bool] = False

    def check(self, args: Mapping[str, Any]) -> None:
        """Raises UserError naming an argument that has the right type and can't be used all the same."""
        for name, value in args.items():
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise UserError(f"{name} must be a finite number of at least 0, not {value}")

    @abstractmethod
    def states(self, config: "Config") -> tuple[str, ...]:
        """What it keeps of every parameter, as large as that, by its name in the arena; averaged with it."""

    @abstractmethod
    def make(self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]) -> "TorchOptimizer":
        """groups: torch's groups of parameters, with their 'weight_decay'. args: without bias_rate."""

    @abstractmethod
    def bind(
        self,
        optimizer: "TorchOptimizer",
        named: "Sequence[tuple[str, torch.Tensor]]",
        arena: "Places",
        config: "Config",
    ) -> None:
        """Makes the arena's tensors the state of every parameter that is trained."""


class MomentumOptimizer(Optimizer):
    """One whose only state is torch's momentum_buffer, which is called momenta in the arena."""

    kept_keys = ("use_momentum",)

    def states(self, config: "Config") -> tuple[str, ...]:
        return ("momenta",) if momentum_of(config) else ()

    def bind(
        self,
        optimizer: "TorchOptimizer",
        named: "Sequence[tuple[str, torch.Tensor]]",
        arena: "Places",
        config: "Config",
    ) -> None:
        if momentum_of(config):
            for name, parameter in named:
                optimizer.state[parameter]["momentum_buffer"] = arena.state_of("momenta", name)
