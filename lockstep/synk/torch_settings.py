"""Settings of torch that change what a callable computes, sent with each call: all ranks use the caller's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

_DEVICE_TYPES = ("cpu", "cuda")


class TorchSettings(NamedTuple):
    """The settings of one thread, and the default dtype, which all threads of a process have in common.

    Attributes:
        autocast: Whether it is on, and its dtype, for each of _DEVICE_TYPES.
    """

    default_dtype: torch.dtype
    inference: bool
    grad: bool
    autocast_caches: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]


def capture() -> TorchSettings:
    """Return this thread's settings, and the default dtype of the process."""
    return TorchSettings(
        default_dtype=torch.get_default_dtype(),
        inference=torch.is_inference_mode_enabled(),
        grad=torch.is_grad_enabled(),
        autocast_caches=torch.is_autocast_cache_enabled(),
        autocast=tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICE_TYPES
        ),
    )


@contextmanager
def use(settings: TorchSettings) -> Iterator[None]:
    """Compute with these settings inside of the `with` block."""
    before = capture()
    with ExitStack() as stack:
        if settings.default_dtype != before.default_dtype:
            torch.set_default_dtype(settings.default_dtype)
            stack.callback(torch.set_default_dtype, before.default_dtype)
        if settings.inference != before.inference:
            stack.enter_context(torch.inference_mode(settings.inference))
        if settings.grad != torch.is_grad_enabled():  # inference_mode changes it, too
            stack.enter_context(torch.set_grad_enabled(settings.grad))
        if any(is_on for is_on, _ in before.autocast):
            torch.clear_autocast_cache()  # other ranks have none, and the weights may have changed
        for device, new, old in zip(_DEVICE_TYPES, settings.autocast, before.autocast, strict=True):
            if new != old:
                is_on, dtype = new
                caches = settings.autocast_caches
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on, cache_enabled=caches))
        yield
