"""What processes hold while they run, sampled from /proc, and whether it grows."""

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = 0.25  # of a process's samples: caches and pools fill in it
FEWEST = 8  # samples after the warm-up from which a slope tells something


@dataclass(frozen=True)
class Sample:
    """memory: bytes of its own (RssAnon). shared: bytes of shared memory that it has touched (RssShmem)."""

    seconds: float
    memory: int
    shared: int
    descriptors: int
    threads: int


def take(pid: int, seconds: float) -> Sample | None:
    """What a process holds now; None where it has gone."""
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
    """How much more a process may hold at the end than after its warm-up, by the slope."""

    memory: float = 4e6  # bytes, or so much of what it holds:
    memory_share: float = 0.01
    shared: float = 1e5


@dataclass
class Series:
    """All samples of one process."""

    samples: list[Sample] = field(default_factory=list)

    def warm(self) -> list[Sample]:
        """Those after the warm-up."""
        return self.samples[int(len(self.samples) * WARM_UP) :]

    def level(self, what: str) -> float:
        """The median after the warm-up."""
        return float(statistics.median(getattr(sample, what) for sample in self.warm()))

    def slope(self, what: str) -> float:
        """By the hour, after the warm-up: the line of least squares."""
        warm = self.warm()
        if len(warm) < 2:
            return 0.0
        times = [sample.seconds for sample in warm]
        return 3600 * statistics.linear_regression(times, [getattr(sample, what) for sample in warm]).slope

    def growth(self, what: str) -> float:
        """What the slope comes to over the samples after the warm-up."""
        warm = self.warm()
        return self.slope(what) * (warm[-1].seconds - warm[0].seconds) / 3600

    def problems(self, limits: Limits) -> list[str]:
        """What grows. Descriptors and threads come and go: the medians of either half are compared."""
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
