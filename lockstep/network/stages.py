"""The stages of a network: its consecutive parts, in the order in which it registers them.

`layer_decay` gives each stage a learning rate; `recompute` runs the stages' forward passes again in the
backward pass instead of keeping their activations (Chen et al. 2016, arXiv 1604.06174).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError
from lockstep.network.dropout import SampleDropout

_LISTS = (nn.Sequential, nn.ModuleList)
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

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _as_before(block, calls)

        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **keywords)

    return run


@contextmanager
def _as_before(block: nn.Module, calls: dict[SampleDropout, int]) -> Iterator[None]:
    """Run a forward pass again: with the same dropout masks, and without counting in running statistics."""
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    now = {module: module.n_calls for module in calls}
    for module, count in calls.items():
        module.n_calls = count
    try:
        yield
    finally:
        for module, count in now.items():
            module.n_calls = count
        for buffer, value in buffers:
            buffer.data.copy_(value)  # through `data`: autograd may still hold the buffer
