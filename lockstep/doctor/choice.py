"""Which GPUs are here, and which devices a run would take."""

import os

from lockstep.backends import devices
from lockstep.backends.gpus import NO_DRIVER, Gpu, list_gpus, visible
from lockstep.doctor.report import Line
from lockstep.errors import UserError


def find_gpus() -> tuple[list[Gpu], list[Line]]:
    """All GPUs, hidden ones too. It is wrong where there is a driver and it has none to show."""
    try:
        gpus = list_gpus()
    except UserError as error:
        return [], [Line("GPUs", f"none: {error}", wrong=not str(error).startswith(NO_DRIVER))]
    return gpus, [Line(f"GPU {gpu.index}", _describe(gpu)) for gpu in gpus]


def choose(asked: tuple[str, ...], gpus: list[Gpu]) -> tuple[tuple[str, ...], list[Line]]:
    """The devices of a run, and lines that say why.

    asked: `devices` of the configuration, empty where it leaves the choice. It is wrong where a device that
    is asked for can't be used, or a GPU is here, and not hidden by CUDA_VISIBLE_DEVICES, that can't be used.
    """
    if asked:
        try:
            chosen = devices.normalise(asked)
            devices.check(chosen)
        except UserError as error:
            return devices.choose()[0], [Line("devices", str(error), wrong=True)]
        line = Line("devices", f"{', '.join(chosen)}, as the configuration says")
    else:
        chosen, reason = devices.choose()
        unused = not devices.on_gpus(chosen) and _offers(gpus)
        line = Line("devices", f"{', '.join(chosen)}; {reason}", wrong=unused)
    return chosen, [line, *(Line("note", text) for text in devices.notices(chosen))]


def _offers(gpus: list[Gpu]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves any of them."""
    try:
        return bool(visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
    except UserError:  # it names a MIG instance
        return True


def _describe(gpu: Gpu) -> str:
    memory = "shared memory" if gpu.memory_mib is None else f"{gpu.memory_mib / 1024:,.1f} GiB"
    mode = "" if gpu.mode == "Default" else f"compute mode {gpu.mode}, "
    return f"{gpu}, {gpu.uuid}, {memory}, MIG {'on' if gpu.mig else 'off'}, {mode}driver {gpu.driver}"
