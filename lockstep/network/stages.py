"""The parts of a network that train differently: frozen ones, and stages.

A stage is one of the consecutive parts of a network, in the order in which it registers them. `freeze` names
parameters that keep their values. `layer_decay` gives each stage a learning rate, `learning_rates` single
parameters. `recompute` runs the stages' forward passes again in the backward pass instead of keeping their
activations (Chen et al. 2016, arXiv 1604.06174).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lockstep.config import Config
from lockstep.errors import UserError, nearest
from lockstep.network.dropout import SampleDropout

_LISTS = (nn.Sequential, nn.ModuleList)
_Buffers = list[tuple[torch.Tensor, torch.Tensor]]  # each with its value at some time
_LEAST_BLOCKS = 3  # a branch within a block, such as GoogLeNet's, may have two


@dataclass(frozen=True)
class Stage:
    """A stage. `prefixes` are the names of its modules: a layer or block, and the norms around it."""

    module: nn.Module
    prefixes: tuple[str, ...]

    def holds(self, parameter_name: str) -> bool:
        """Return whether a parameter belongs to the stage."""
        return any(parameter_name.startswith(f"{prefix}.") for prefix in self.prefixes)


def stages_of(model: nn.Module) -> list[Stage]:
    """Return the stages that have weights, in the order of registration.

    Sequential and ModuleList are opened, so each block of a residual network or layer of a chain is a stage.
    So are modules around a list of equal blocks, such as the encoder of a vision transformer.
    Norms, which have no tensor of two dimensions, belong to the stage before them.
    """
    stages: list[Stage] = []
    for name, module in _parts(model, ""):
        sizes = [parameter.dim() for parameter in module.parameters()]
        if not sizes:
            continue
        if max(sizes) < 2 and stages:
            stages[-1] = Stage(stages[-1].module, (*stages[-1].prefixes, name))
        else:
            stages.append(Stage(module, (name,)))
    return stages


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if type(child) in _LISTS or any(map(_is_list_of_blocks, child.children())):
            yield from _parts(child, path)
        else:
            yield path, child


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of at least three blocks of one class, each of several layers.

    Chains, such as a convolution with its norm and activation, are layers of one block (MobileNetV3's).
    """
    blocks = list(module.children())
    alike = len({type(block) for block in blocks}) == 1 and not isinstance(blocks[0], nn.Sequential)
    return type(module) in _LISTS and len(blocks) >= _LEAST_BLOCKS and alike and any(blocks[0].children())


def recompute(model: nn.Module, name: str) -> int:
    """Make every block of the model keep its inputs only, in place. Return the number of blocks.

    Single layers stay as they are: their activations are the next stage's inputs.

    Args:
        model: The network.
        name: Its name, for the error.

    Raises:
        UserError: The network has no blocks of several layers.
    """
    blocks = [stage.module for stage in stages_of(model) if any(True for _ in stage.module.children())]
    if not blocks:
        raise UserError(
            f"recompute: model {name} has no blocks of several layers, such as those of a residual network. "
            "Set recompute: false."
        )
    for block in blocks:
        block.forward = _recomputed(block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's forward function whose activations are computed again in the backward pass."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*arguments, **keywords)
        calls = {module: module.n_calls for module in block.modules() if isinstance(module, SampleDropout)}
        buffers = _copies(block)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _as_before(block, calls, buffers)

        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **keywords)

    return run


@contextmanager
def _as_before(block: nn.Module, calls: dict[SampleDropout, int], buffers: _Buffers) -> Iterator[None]:
    """Run a forward pass again: with the same dropout masks and buffers, which then get their new values."""
    now, new_buffers = {module: module.n_calls for module in calls}, _copies(block)
    for module, count in calls.items():
        module.n_calls, module.replays = count, True
    _restore(buffers)
    try:
        yield
    finally:
        for module, count in now.items():
            module.n_calls, module.replays = count, False
        _restore(new_buffers)


def _copies(block: nn.Module) -> _Buffers:
    return [(buffer, buffer.clone()) for buffer in block.buffers()]


def _restore(buffers: _Buffers) -> None:
    for buffer, value in buffers:
        buffer.data.copy_(value)  # through `data`: autograd may still hold the buffer


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
