"""The attempts to complete a run, their failures, and what the attempt after a failure starts from."""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.comm.group import World
from lockstep.config import Config
from lockstep.config.rules import discarded_replicas, on_failure_of, settle
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.launch.children import ExitStatus
from lockstep.launch.hosting import SingleHost
from lockstep.launch.template import Template
from lockstep.loading.orders import Orders
from lockstep.runs.checkpoint_files import find_checkpoint, remove_unfinished
from lockstep.runs.folder import RunFolder
from lockstep.runs.plan import FailureRate, HostConnection, RunPlan
from lockstep.runs.snapshot import Retained
from lockstep.runs.state import State
from lockstep.signals import Interrupts

DAMAGED = "is damaged: its checksum is not the recorded one"


@dataclass
class Failures:
    """The failures of a run so far, as its launcher knows them.

    Attributes:
        unresolved: The one from which the run is recovering, or None.
        furthest: The last step that was completed in any attempt; -1 before the first attempt has ended.
        n_without_progress: Failures in a row without progress between them.
        rate: All failures since the launcher began.
        is_counted: Whether the failure of the present attempt is among them.
    """

    unresolved: "FailedAttempt | None" = None
    furthest: int = -1
    n_without_progress: int = 0
    rate: FailureRate = field(default_factory=lambda: FailureRate(0, time.monotonic()))
    is_counted: bool = False

    def n_before(self, step: int) -> int:
        """Return how many failures there were before that of the present attempt, since the last progress.

        Args:
            step: The last completed step, counted from the start of the run.
        """
        if self.is_counted:
            return self.n_without_progress - 1
        return 0 if step > self.furthest >= 0 else self.n_without_progress

    def add(self, exit_status: ExitStatus, step: int) -> int:
        """Add the failure of the present attempt, or replace its cause. Return `n_before`."""
        n_before = self.n_before(step)
        if not self.is_counted:
            self.rate = FailureRate(self.rate.n + 1, self.rate.begin)
        self.unresolved, self.is_counted = FailedAttempt(exit_status, step, time.monotonic()), True
        self.furthest, self.n_without_progress = max(step, self.furthest), n_before + 1
        return n_before


@dataclass(frozen=True)
class Context:
    """A launcher's objects for the whole of a run: its part among the hosts, signals, template, failures."""

    host: SingleHost
    interrupts: Interrupts
    template: Template | None
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True)
class Attempt:
    """One start of a run's processes.

    Attributes:
        config: The run's, with the devices of this attempt.
        run: Its folder and the checkpoint on disk from which it starts.
        retained: The memory checkpoint from which it starts instead, or None.
        number: 0 for the first attempt.
        state: The state from which it starts; None from scratch. Later checkpoints replace the one in memory.
    """

    config: Config
    run: RunFolder
    retained: Retained | None = None
    number: int = 0
    state: State | None = field(init=False)

    def __post_init__(self) -> None:
        on_disk = self.run.start.state if self.run.start else None
        object.__setattr__(self, "state", self.retained.state() if self.retained else on_disk)

    def plan(
        self, host_connection: HostConnection | None, writes: bool, failure_rate: FailureRate
    ) -> RunPlan:
        """Return the settings of the attempt's processes. See RunPlan for the arguments."""
        start = self.run.start.path if self.run.start else None
        if host_connection:  # keys in the hosts' store of this attempt's own
            prefix = f"{host_connection.prefix}/{self.number}"
            host_connection = dataclasses.replace(host_connection, prefix=prefix)
        return RunPlan(
            self.config,
            self.run.folder,
            start,
            host_connection,
            writes,
            retains=retains(self.config),
            retained=self.retained,
            failure_rate=failure_rate,
        )

    @property
    def source(self) -> str:
        """The checkpoint from which the attempt starts, in a few words."""
        if self.retained:
            return "memory"
        return self.run.start.path.stem if self.run.start else "the beginning"


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed, and from which the run is recovering.

    Attributes:
        step: The last completed step, counted from the start of the run.
        time: When the launcher knew of the failure (monotonic clock).
    """

    exit_status: ExitStatus
    step: int
    time: float


def worlds_of(config: Config) -> list[World]:
    """Return the ranks of this host's trainers."""
    return World.of_host(config.host_rank or 0, config.n_hosts, len(config.devices))


def orders_of(config: Config, dataset: Dataset) -> Orders:
    """Return the orders of this host's first trainer, which count the steps of an epoch."""
    return Orders(config, worlds_of(config)[0], len(dataset.train), len(dataset.val))


def retains(config: Config) -> bool:
    """Return whether a run makes memory checkpoints: to restart, to be preempted, or to be resized."""
    is_needed = on_failure_of(config) != "stop" or config.preempt_seconds is not None
    is_needed |= config.global_batch_size is not None and config.n_hosts == 1
    return is_needed and config.memory_checkpoint_seconds is not None


def next_attempt(
    attempt: Attempt,
    exit_status: ExitStatus,
    n_failures: int,
    retained: Retained | None = None,
    host: SingleHost | None = None,
) -> Attempt | None:
    """Return the attempt with which to resume, or None if the run ends.

    Only a process that was killed or hangs counts as lost: an error would recur.

    Args:
        n_failures: Failures since the run last made progress, without this one.
        retained: The newest memory checkpoint of all hosts. If it is damaged on any host, all resume from the
            disk.
        host: This host's part among several hosts.

    Raises:
        UserError: `on_failure` asks for a restart, and the run can't resume.
        HostFailed: Another host has ended.
    """
    config = attempt.config
    on_failure = on_failure_of(config)
    if not exit_status.lost or on_failure == "stop" or n_failures >= config.max_restarts:
        return None
    if exit_status.is_faulty and on_failure != "shrink":  # its device would compute wrong numbers again
        return None
    if on_failure == "shrink":
        smaller = _without_trainer(config, int(exit_status.lost.split()[-1]))
        if smaller is None:
            return None
        config = smaller
    return resume(attempt, config, retained, host or SingleHost())


def resume(attempt: Attempt, config: Config, retained: Retained | None, host: SingleHost) -> Attempt:
    """Return the attempt after another one, from a memory checkpoint that is whole on all hosts, or the disk.

    Raises as `next_attempt`.
    """
    run, number, notes = attempt.run, attempt.number + 1, list[str]()
    clean_folder(run.folder)
    if retained and (damaged_on := host.names_without(retained.is_whole(), number)):
        of_whom = f" of {' and '.join(damaged_on)}" if config.n_hosts > 1 else ""
        notes, retained = [f"the memory checkpoint{of_whom} {DAMAGED}"], None
    if retained is None:
        notes += host.bring_newest(config, number)
        try:
            start, damaged = find_checkpoint(run.folder, "latest")
            notes, run = [*notes, *damaged], dataclasses.replace(run, start=start)
        except UserError:  # no checkpoint yet: from where this run began
            pass
        host.check_start(run, number)
    found = Attempt(config, dataclasses.replace(run, notes=notes), retained, number)
    if state := found.state:
        notes += filter(None, [discarded_replicas(state.config.get("rule", ""), state.n_trainers, config)])
    return found


def clean_folder(folder: Path) -> None:
    """Remove files that a lost writer has left. Raise UserError if the folder can't be written to."""
    try:
        remove_unfinished(folder)
    except OSError as error:
        raise UserError(f"{folder}: can't be written to: {error.strerror}") from error


def _without_trainer(config: Config, rank: int) -> Config | None:
    """Return the run with one trainer less, and equal shares of `logical_ranks`; None if none is left."""
    devices = config.devices[:rank] + config.devices[rank + 1 :]
    if not devices:
        return None
    shares = config.shares if config.shares == "auto" else "equal"
    return settle(dataclasses.replace(config, devices=devices, shares=shares))[0]
