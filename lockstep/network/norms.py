"""Protection from two errors of torch on CPUs, in the backward passes of norms of channels-last images."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.library import Library, get_kernel
from torch.nn.modules.instancenorm import _InstanceNorm

from lockstep.network.low_precision import is_transformed


def protect_instance_norms(model: nn.Module) -> None:
    """Have the backward pass of instance norms get gradients that are channels first.

    On a CPU it takes a gradient of a single channels-last image for one that is channels first.
    """
    for module in model.modules():
        if isinstance(module, _InstanceNorm):
            module.register_forward_hook(_with_gradient_channels_first)


def _with_gradient_channels_first(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
    """Have the gradient of a norm's output made channels first."""
    if output.requires_grad and not torch.compiler.is_compiling() and not is_transformed():
        output.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]


@cache
def protect_group_norms() -> Library:
    """Have the backward pass of group norms on CPUs always compute their images' gradient, in this process.

    If nobody needs that gradient, as behind frozen layers, and the images are channels last, torch writes it
    to address 0.

    Returns:
        The registration of the new backward pass, which lasts as long as this object.
    """
    name = "native_group_norm_backward"
    kernel = get_kernel(f"aten::{name}", "CPU")
    registration = Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def with_images(keys: Any, *arguments: Any) -> Any:
        *others, needed = arguments
        return kernel.call_boxed(keys, *others, [True, *needed[1:]])

    with warnings.catch_warnings(action="ignore"):  # of an overridden kernel
        registration.impl(  # type: ignore[no-untyped-call]
            name, with_images, "CPU", with_keyset=True, allow_override=True
        )
    return registration
