"""Settings of torch that change what a callable computes, sent with each call: all ranks use the caller's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

_DEVICE_TYPES = ("cpu", "cuda")


def _matmul_precision() -> str | None:
    with suppress(RuntimeError):  # it was set by torch's newer names, which exclude this one
        return torch.get_float32_matmul_precision()
    return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _deterministic() -> tuple[bool, bool]:
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns_only


def _set_deterministic(setting: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])


def _anomaly_detection() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly_detection(setting: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*setting)


# Functions that get and set what all threads of a process have in common
_PROCESS_WIDE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (_matmul_precision, _set_matmul_precision),
    (_anomaly_detection, _set_anomaly_detection),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)


class TorchSettings(NamedTuple):
    """The settings of one thread, and those that all threads of a process have in common.

    Attributes:
        process_wide: By place in _PROCESS_WIDE.
        autocast: Whether it is on, and its dtype, for each of _DEVICE_TYPES.
    """

    process_wide: tuple[Any, ...]
    inference: bool
    grad: bool
    autocast_caches: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]


def capture() -> TorchSettings:
    """Return this thread's settings, and those of the process."""
    return TorchSettings(
        process_wide=tuple(get() for get, _ in _PROCESS_WIDE),
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
        rows = zip(_PROCESS_WIDE, settings.process_wide, before.process_wide, strict=True)
        for (_, set_to), new_value, old_value in rows:
            if new_value != old_value:
                stack.callback(set_to, old_value)
                set_to(new_value)
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
