"""The settings that a launcher sends to all processes of a run when it starts them.

They are small, because they go through a pipe that is not read yet. A process reads the dataset's headers and
labels, and the checkpoint, itself.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import Config
from lockstep.runs.snapshot import Retained


@dataclass(frozen=True)
class HostConnection:
    """The way to other hosts: their store, the prefix of all keys in it, and this host's own address."""

    store: tuple[str, int]
    prefix: str
    address: str


@dataclass(frozen=True)
class FailureRate:
    """The losses of a run's processes: `n` since `begin` (this machine's monotonic clock)."""

    n: int = 0
    begin: float = 0.0

    def mean_seconds(self) -> float | None:
        """Return the mean time between two failures, as of now; None before the first failure."""
        return (time.monotonic() - self.begin) / self.n if self.n else None


@dataclass(frozen=True)
class RunPlan:
    """The settings of all processes of a run: how to train and where to write.

    Attributes:
        config: The complete configuration.
        folder: The run's folder.
        start: The tensors of the checkpoint to resume from; None from scratch.
        host_connection: How to reach other hosts; None on a single host.
        writes: Whether this host writes to the folder; otherwise another host does.
        retains: Whether trainer 0 makes memory checkpoints, which the launcher retains.
        retained: The memory checkpoint to resume from, instead of `start`.
        failure_rate: That of the run before this start of its processes.
    """

    config: Config
    folder: Path
    start: Path | None
    host_connection: HostConnection | None = None
    writes: bool = True
    retains: bool = False
    retained: Retained | None = None
    failure_rate: FailureRate = FailureRate()

    def retained_names(self) -> Collection[str]:
        """Return the names of the tensors in the memory checkpoint; none without it."""
        return self.retained.tensors() if self.retained else ()
