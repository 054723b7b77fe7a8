"""How much host memory this process may still take: by the kernel's count, and by its control groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 of control groups writes a number like this where there is no limit


@dataclass(frozen=True)
class GroupLimit:
    """A control group's limit on memory and what its processes have, in bytes.

    used: without the page cache, which the kernel drops before it kills anyone.
    """

    limit: int
    used: int


def group_limits(process: Path = _PROCESS, root: Path = _ROOT) -> Iterator[GroupLimit]:
    """Of this process's control group and of all above it, whose limits hold for it, too.

    Version 2: memory.max; version 1: memory.limit_in_bytes (cgroups(7); the kernel's admin guide, "cgroup-v2"
    and "cgroup-v1/memory").
    """
    for line in process.read_text().splitlines() if process.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top or top in folder.parents:
                yield from _limit_of(folder, *names)


def available_bytes(process: Path = _PROCESS, root: Path = _ROOT) -> int:
    """What can be allocated without swapping (proc(5), MemAvailable) and without passing a group's limit."""
    left = [max(0, group.limit - group.used) for group in group_limits(process, root)]
    return min([memory_of_machine()["MemAvailable"], *left])


def memory_of_machine() -> dict[str, int]:
    """Bytes by name (proc(5), /proc/meminfo)."""
    fields = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(text.split()[0]) * 1024 for name, text in fields}


def _limit_of(folder: Path, limit: str, usage: str, prefix: str) -> Iterator[GroupLimit]:
    text = _read(folder / limit)
    if text.isdigit() and int(text) < _NO_LIMIT:  # or 'max'
        counts = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
        cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        yield GroupLimit(int(text), int(_read(folder / usage) or 0) - cached)


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
