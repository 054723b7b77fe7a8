"""The processor, and the limits on memory and disk that a run can meet."""

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from lockstep.backends.devices import count_cores
from lockstep.doctor.report import Line

_NO_LIMIT = 1 << 60  # version 1 of control groups writes a number like this where there is no limit
_GIB = 1 << 30


def describe(runs: Path) -> Iterator[Line]:
    """runs: the folder that runs are to be written to; it need not be there yet."""
    yield Line("processor", f"{_processor()}, {count_cores()} of {os.cpu_count()} cores for this process")
    memory = _memory()
    total, available = memory["MemTotal"], memory["MemAvailable"]
    yield Line("memory", f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f}")
    limit = cgroup_limit()
    text = "none" if limit is None else f"{limit / _GIB:.1f} GiB; a run that takes more is killed"
    yield Line("limit by control group", text)
    yield Line("limit on locked memory", _locked_memory())
    yield _describe_runs(runs)


def cgroup_limit(
    process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes of memory that the control groups of this process leave it, or None without a limit.

    A group's limit holds for all groups below it, so the least from its own up to the root counts. Version 2:
    memory.max; version 1: memory.limit_in_bytes (cgroups(7); the kernel's admin guide, "cgroup-v2" and
    "cgroup-v1/memory").
    """
    limits = [_NO_LIMIT]
    for line in process.read_text().splitlines() if process.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            if (folder == top or top in folder.parents) and file.is_file():
                text = file.read_text().strip()
                limits += [int(text)] if text.isdigit() else []  # or 'max'
    least = min(limits)
    return least if least < _NO_LIMIT else None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> dict[str, int]:
    """Bytes by name (proc(5), /proc/meminfo)."""
    fields = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(text.split()[0]) * 1024 for name, text in fields}


def _locked_memory() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "none"
    return f"{limit / 2**20:,.1f} MiB (ulimit -l); raise it if page-locked memory for a GPU can't be had"


def _describe_runs(runs: Path) -> Line:
    place = existing(runs)
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:,.1f} GiB free in {place}, where runs are written"
    if not os.access(place, os.W_OK):
        return Line("disk space", f"{place} can't be written to: set weights_dir", wrong=True)
    return Line("disk space", text)
