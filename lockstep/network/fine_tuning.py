"""The parameters that a run trains and their learning rates: `freeze`, `learning_rates`, `layer_decay`."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import Config
from lockstep.errors import UserError, nearest
from lockstep.network.stages import stages_of


class Frozen:
    """The frozen part of a network: its parameters have no gradient, its norms keep their statistics.

    Args:
        model: The network, whose parameters are frozen in place: at once, or with `until` by `begin_epoch`,
            so that states and gradients have room for them.
        patterns: `freeze`: patterns of parameters' names.
        until: `unfreeze_epoch`: the first epoch in which nothing is frozen; None: never.

    Attributes:
        parameters: Their names.
        buffers: The names of the buffers of batch normalization whose parameters are all frozen, or which has
            none and whose statistics match a pattern.

    Raises:
        UserError: A pattern matches no parameter, or nothing is left to train.
    """

    def __init__(self, model: nn.Module, patterns: Iterable[str], until: int | None = None) -> None:
        named = dict(model.named_parameters())
        self.parameters = list(
            dict.fromkeys(n for each in patterns for n in _matching("freeze", each, named))
        )
        self._until, self._lasts = until, True
        self._values = [named[name] for name in self.parameters if named[name].requires_grad]
        if self._values and len(self._values) == sum(value.requires_grad for value in named.values()):
            raise UserError(
                "freeze: its patterns match all parameters, so nothing is left to train. Name fewer."
            )
        if until is None:
            self._set(is_trained=False)
        norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
        kept = {name: norm for name, norm in norms.items() if self._keeps(name, norm, tuple(patterns))}
        self._norms = list(kept.values())
        self.buffers = [f"{name}.{key}" for name, norm in kept.items() for key, _ in norm.named_buffers()]

    def begin_epoch(self, epoch: int) -> bool:
        """Freeze or unfreeze the parameters, as the epoch asks. Return whether it is past `until`."""
        self._lasts = self._until is None or epoch < self._until
        self._set(is_trained=not self._lasts)
        return not self._lasts

    def begin_training(self, model: nn.Module) -> None:
        """Switch the network to training, and its frozen norms to their own statistics."""
        model.train()
        for norm in self._norms if self._lasts else ():
            norm.eval()

    def keeps(self, buffer: str) -> bool:
        """Return whether a buffer is frozen at present."""
        return self._lasts and buffer in self.buffers

    def _set(self, is_trained: bool) -> None:
        for value in self._values:
            value.requires_grad_(is_trained)

    def _keeps(self, name: str, norm: nn.Module, patterns: tuple[str, ...]) -> bool:
        own = [key for key, _ in norm.named_parameters()]
        if own:
            return all(f"{name}.{key}" in self.parameters for key in own)
        return any(fnmatchcase(f"{name}.running_mean", pattern) for pattern in patterns)


def rate_scales(model: nn.Module, config: Config) -> dict[str, float]:
    """Return the factor of the learning rate of each trained parameter, by name.

    The last stage has factor 1 by `layer_decay`, each stage before it `layer_decay` times its successor's
    (Howard and Ruder 2018, arXiv 1801.06146, section 3.2). `learning_rates` multiplies that; if several of
    its patterns match a parameter, the last one counts.

    Raises:
        UserError: A pattern of `learning_rates` matches no trained parameter.
    """
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    scales = dict.fromkeys(named, 1.0)
    for pattern, factor in config.learning_rates.items():
        scales |= dict.fromkeys(_matching("learning_rates", pattern, named), float(factor))
    if config.layer_decay is None:
        return scales
    stages = stages_of(model)
    for name in named:  # a parameter of the network itself belongs to its first stage
        place = next((number for number, stage in enumerate(stages) if stage.holds(name)), 0)
        scales[name] *= config.layer_decay ** (len(stages) - 1 - place)
    return scales


def _matching(key: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern, or raise UserError if none does."""
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        which = "trained parameter" if key == "learning_rates" else "parameter"
        raise UserError(
            f"{key}: no {which} of the network matches {pattern!r}{nearest(pattern, names)}. Patterns are of "
            "whole names, such as layer1.*"
        )
    return matching
