"""The host memory that this process may allocate: the machine's, within the limits of its control groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 of control groups writes a number like this where there is no limit


@dataclass(frozen=True)
class GroupLimit:
    """A control group's limit on memory, in bytes.

    Attributes:
        used: Memory of its processes, without the page cache, which the kernel drops before it kills a
            process.
    """

    limit: int
    used: int


def group_limits(process: Path = _PROCESS, root: Path = _ROOT) -> Iterator[GroupLimit]:
    """Yield the limits of this process's control group and of all groups above it, which also apply.

    Version 2 has memory.max, version 1 memory.limit_in_bytes (cgroups(7); the kernel's admin guide,
    "cgroup-v2" and "cgroup-v1/memory").
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


def allowed_bytes(process: Path = _PROCESS, root: Path = _ROOT) -> int:
    """Return the most that one allocation can have: the machine's memory, or what a group's limit leaves.

    MemAvailable is no bound: a virtual machine's memory may start small and grow as it is used.
    """
    left = [max(0, group.limit - group.used) for group in group_limits(process, root)]
    return min([memory_of_machine()["MemTotal"], *left])


def memory_of_machine() -> dict[str, int]:
    """Return the fields of /proc/meminfo (proc(5)) in bytes, by name."""
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
