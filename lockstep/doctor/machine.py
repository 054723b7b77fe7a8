"""The processor, and the limits of memory and disk."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from lockstep.backends.devices import count_cores, processor
from lockstep.doctor.report import Finding
from lockstep.memory.limits import group_limits, memory_of_machine

_GIB = 1 << 30


def describe(runs: Path) -> Iterator[Finding]:
    """Yield lines about the machine. runs: the folder of runs, which may be missing yet."""
    yield Finding("processor", f"{processor()}, {count_cores()} of {os.cpu_count()} cores for this process")
    memory = memory_of_machine()
    total, available = memory["MemTotal"], memory["MemAvailable"]
    yield Finding("memory", f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f}")
    limits = [group.limit for group in group_limits()]
    text = f"{min(limits) / _GIB:.1f} GiB; a run that takes more is killed" if limits else "none"
    yield Finding("limit by control group", text)
    yield Finding("limit on locked memory", _locked_memory())
    yield _describe_runs(runs)


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def _locked_memory() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "none"
    return f"{limit / 2**20:,.1f} MiB (ulimit -l); raise it if page-locked memory for a GPU can't be had"


def _describe_runs(runs: Path) -> Finding:
    place = existing(runs)
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:,.1f} GiB free in {place}, where runs are written"
    if not os.access(place, os.W_OK):
        return Finding("disk space", f"{place} can't be written to: set weights_dir", wrong=True)
    return Finding("disk space", text)
