"""The GPUs of this machine, and the devices that a run would use."""

import os

from lockstep.backends import devices
from lockstep.backends.gpus import NO_DRIVER, Gpu, list_gpus, visible
from lockstep.doctor.report import Finding
from lockstep.errors import UserError


def find_gpus() -> tuple[list[Gpu], list[Finding]]:
    """Return all GPUs, also hidden ones, and lines about them. A driver without GPUs is wrong."""
    try:
        gpus = list_gpus()
    except UserError as error:
        return [], [Finding("GPUs", f"none: {error}", wrong=not str(error).startswith(NO_DRIVER))]
    return gpus, [Finding(f"GPU {gpu.index}", _describe(gpu)) for gpu in gpus]


def choose(asked: tuple[str, ...], gpus: list[Gpu]) -> tuple[tuple[str, ...], list[Finding]]:
    """Return the devices of a run, and lines with the reasons.

    A line is wrong if a requested device or a visible GPU can't be used.

    Args:
        asked: `devices` of the configuration; empty if Lockstep chooses.
        gpus: All GPUs of the machine.
    """
    if asked:
        try:
            chosen = devices.normalise(asked)
            devices.check(chosen)
        except UserError as error:
            return devices.choose()[0], [Finding("devices", str(error), wrong=True)]
        line = Finding("devices", f"{', '.join(chosen)}, as the configuration says")
    else:
        chosen, reason = devices.choose()
        unused = not devices.on_gpus(chosen) and _offers(gpus)
        line = Finding("devices", f"{', '.join(chosen)}; {reason}", wrong=unused)
    return chosen, [line, *(Finding("note", text) for text in devices.notices(chosen))]


def _offers(gpus: list[Gpu]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES leaves any GPU visible."""
    try:
        return bool(visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
    except UserError:  # it names a MIG instance
        return True


def _describe(gpu: Gpu) -> str:
    memory = "shared memory" if gpu.memory_mib is None else f"{gpu.memory_mib / 1024:,.1f} GiB"
    mode = "" if gpu.mode == "Default" else f"compute mode {gpu.mode}, "
    return f"{gpu}, {gpu.uuid}, {memory}, MIG {'on' if gpu.mig else 'off'}, {mode}driver {gpu.driver}"
