"""The interface of an optimizer: what it declares to the program."""

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
    """Return the configured momentum, or 0 without use_momentum."""
    return config.momentum if config.use_momentum else 0.0


class StateStorage(Protocol):
    """The memory of an optimizer's state: an arena, or the pieces of one on which a trainer steps.

    Attributes:
        flat: A tensor of the weights' dtype and device.
        local: Kind to counts, one number for each parameter.
    """

    flat: "torch.Tensor"
    local: "dict[str, torch.Tensor]"

    def state_of(self, kind: str, parameter_name: str) -> "torch.Tensor":
        """Return one kind of state of a parameter, in the parameter's shape."""


class Optimizer(ABC):
    """All that the program knows of an optimizer. It has no state, and imports torch in `make` only.

    Its update must be elementwise, but for the norms of whole tensors if `needs_norms` is set. Where it steps
    on pieces of tensors, its groups then have 'norms': {piece: (norm of gradient, norm of weight)}, float64
    scalars on the device, for parameters of several dimensions.

    Attributes:
        defaults: Arguments beside the keys that all optimizers have: floats or tuples of floats. All have
            bias_rate, the learning rate of biases as a multiple of the weights'.
        inexact: Why N trainers differ from one with N times the batch, if each steps separately; '' where the
            update is linear in the gradient.
        kept_keys: Keys of the configuration that a resumed run cannot change, because the state depends on
            them.
        needs_norms: Whether the update needs norms of whole tensors.
    """

    defaults: ClassVar[Mapping[str, Any]]
    inexact: ClassVar[str] = ""
    kept_keys: ClassVar[tuple[str, ...]] = ()
    needs_norms: ClassVar[bool] = False

    def check(self, args: Mapping[str, Any]) -> None:
        """Check the values of arguments that have the right types.

        Raises:
            UserError: A value cannot be used; the message names the argument.
        """
        for name, value in args.items():
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise UserError(f"{name} must be a finite number of at least 0, not {value}")

    @abstractmethod
    def states(self, config: "Config") -> tuple[str, ...]:
        """Return the kinds of state, each as large as its parameter; they are averaged with the weights."""

    @abstractmethod
    def make(self, groups: list[dict[str, Any]], config: "Config", args: dict[str, Any]) -> "TorchOptimizer":
        """Return the optimizer.

        Args:
            groups: torch's groups of parameters, with their 'weight_decay'.
            config: The run's configuration.
            args: The arguments without bias_rate.
        """

    @abstractmethod
    def bind(
        self,
        optimizer: "TorchOptimizer",
        named: "Sequence[tuple[str, torch.Tensor]]",
        arena: "StateStorage",
        config: "Config",
    ) -> None:
        """Make the arena's tensors the state of every trained parameter."""


class MomentumOptimizer(Optimizer):
    """An optimizer whose only state is torch's momentum_buffer, named momenta in the arena."""

    kept_keys = ("use_momentum",)

    def states(self, config: "Config") -> tuple[str, ...]:
        return ("momenta",) if momentum_of(config) else ()

    def bind(
        self,
        optimizer: "TorchOptimizer",
        named: "Sequence[tuple[str, torch.Tensor]]",
        arena: "StateStorage",
        config: "Config",
    ) -> None:
        if momentum_of(config):
            for name, parameter in named:
                optimizer.state[parameter]["momentum_buffer"] = arena.state_of("momenta", name)
