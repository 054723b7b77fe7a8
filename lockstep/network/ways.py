"""Which way the parts of a network are computed, for a run's record: by name, in words."""

from torch import nn

from lockstep.config import Config
from lockstep.network.convolution import Convolution
from lockstep.network.precision import keeps_copies
from lockstep.network.step_graph import why_not_captured


def ways_of(model: nn.Module, config: Config, on_gpu: bool) -> dict[str, str]:
    """What can be said before the first step: whether capturing and compiling succeed is told later."""
    copies = ", with bfloat16 copies of the weights" if keeps_copies(config, model) else ""
    why_not = why_not_captured(config, on_gpu)
    return {
        "precision": config.precision + copies,
        "conv_forms": _forms(model, config),
        "cuda_graph": f"not captured: {why_not}" if why_not else "to be captured in the fourth whole step",
        "compile": "to be compiled in the first whole step" if config.compile else "not compiled: as asked",
    }


def _forms(model: nn.Module, config: Config) -> str:
    """Which convolutions are in which form."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Convolution)}
    found = {
        "space_to_depth": [name for name, layer in layers.items() if layer.takes_blocks()],
        "dense": [name for name, layer in layers.items() if layer.is_dense() and not layer.takes_blocks()],
    }
    parts = [f"{form}: {', '.join(names)}" for form, names in found.items() if names]
    return "; ".join(parts) or f"plain (conv_forms: {config.conv_forms})"
