"""Resources of running processes, sampled from /proc, and whether they grow."""

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = 0.25  # share of a process's samples in which caches and pools fill
FEWEST = 8  # samples after the warm-up that a slope needs


@dataclass(frozen=True)
class Sample:
    """The resources of a process: private memory (RssAnon) and touched shared memory (RssShmem) in bytes."""

    seconds: float
    memory: int
    shared: int
    descriptors: int
    threads: int


def take(pid: int, seconds: float) -> Sample | None:
    """Return the present resources of a process, or None if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    facts = {
        name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.split()
    }
    if "RssAnon" not in facts:  # a zombie has no memory
        return None
    memory, shared = (int(facts[name]) * 1024 for name in ("RssAnon", "RssShmem"))
    return Sample(seconds, memory, shared, descriptors, int(facts["Threads"]))


@dataclass(frozen=True)
class Limits:
    """The growth that is allowed between a process's warm-up and its end, by the slope."""

    memory: float = 4e6  # bytes, or so much of what it holds:
    memory_share: float = 0.01
    shared: float = 1e5


@dataclass
class Series:
    """The samples of one process."""

    samples: list[Sample] = field(default_factory=list)

    def warm(self) -> list[Sample]:
        """Return the samples after the warm-up."""
        return self.samples[int(len(self.samples) * WARM_UP) :]

    def level(self, what: str) -> float:
        """Return the median after the warm-up."""
        return float(statistics.median(getattr(sample, what) for sample in self.warm()))

    def slope(self, what: str) -> float:
        """Return the least-squares slope per hour after the warm-up."""
        warm = self.warm()
        if len(warm) < 2:
            return 0.0
        times = [sample.seconds for sample in warm]
        return 3600 * statistics.linear_regression(times, [getattr(sample, what) for sample in warm]).slope

    def growth(self, what: str) -> float:
        """Return the growth over the samples after the warm-up, by the slope."""
        warm = self.warm()
        return self.slope(what) * (warm[-1].seconds - warm[0].seconds) / 3600

    def problems(self, limits: Limits) -> list[str]:
        """Yield what grows. Descriptors and threads fluctuate, so medians of both halves are compared."""
        warm = self.warm()
        if len(warm) < FEWEST:
            return []
        found = []
        if self.growth("memory") > max(limits.memory, limits.memory_share * self.level("memory")):
            found.append(f"memory grows by {self.slope('memory') / 1e6:.1f} MB an hour")
        if self.growth("shared") > limits.shared:
            found.append(f"shared memory grows by {self.slope('shared') / 1e6:.1f} MB an hour")
        for what in ("descriptors", "threads"):
            first, last = warm[: len(warm) // 2], warm[len(warm) // 2 :]
            before, after = (statistics.median(getattr(s, what) for s in half) for half in (first, last))
            if after >= before + 1:
                found.append(f"{what} grow from {before:g} to {after:g}")
        return found
