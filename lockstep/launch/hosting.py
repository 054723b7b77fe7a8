"""A launcher's part in a run over several hosts (lockstep/hosts): joining, agreeing, watching, leaving."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lockstep.config import Config
from lockstep.config.hosts import torchrun_has_store
from lockstep.data.dataset import Dataset
from lockstep.errors import PeerProblem, UserError
from lockstep.hosts import agreement, folders
from lockstep.hosts.agreement import (
    AttemptEnd,
    Moment,
    await_other_end,
    describe_losses,
    exchange_ends,
    newest_common,
)
from lockstep.hosts.heartbeat import Heartbeat
from lockstep.hosts.rendezvous import STOPPED, Rendezvous, attempt_key, join_rendezvous, serve
from lockstep.hosts.store import HostFailed, HostLost, Store, as_record, refusal
from lockstep.launch.children import ExitStatus
from lockstep.launch.console import show
from lockstep.launch.processes import Processes
from lockstep.launch.template import Template
from lockstep.runs import checkpoint_files
from lockstep.runs import folder as runfolder
from lockstep.runs.folder import RunFolder, log_name
from lockstep.runs.plan import HostConnection
from lockstep.signals import Interrupts, ignore_signals

FAILURE_SECONDS = 8.0  # after a failure caused by another host, for that host to report the cause
_END_SECONDS = 20.0  # beside `timeout`, for a host to end its processes and to compare a digest


@dataclasses.dataclass(frozen=True)
class JointEnd:
    """The end of an attempt on all hosts.

    Attributes:
        exit_status: Why the attempt ended.
        step: The last completed step, counted from the start of the run.
        moment: Of the newest memory checkpoint that all hosts have, or None.
    """

    exit_status: ExitStatus
    step: int
    moment: Moment | None


class Rejoining(Exception):
    """The launcher of another host was lost; this launcher waits for it, and starts over with it.

    Args:
        lost: Which one, and how it was lost.
        deadline: Until when to wait for it (monotonic clock).
        store: The store that this launcher serves; None on other hosts than host 0.
    """

    def __init__(self, lost: HostLost, deadline: float, store: Store | None = None) -> None:
        super().__init__(str(lost))
        self.lost, self.deadline, self.store = lost, deadline, store


class SingleHost:
    """The launcher of a run on one host, and the interface of MultiHost.

    Attributes:
        host_connection: How trainers reach those of other hosts; None on a single host.
        host: This host's number.
        writes: Whether this host writes to the run's folder; otherwise host 0 does.
        log: The name of this host's log in that folder.
    """

    host_connection: HostConnection | None = None
    host, writes, log = 0, True, log_name(0)

    def bring_checkpoint(self, config: Config) -> list[str]:
        """Fetch the newest checkpoint from the host that has it, when resuming. Return notes."""
        return []

    def agree(self, config: Config, dataset: Dataset) -> list[str]:
        """Raise UserError on all hosts if programs, settings or data differ between hosts. Return notes."""
        return []

    def open_run(
        self, config: Config, n_train: int, dataset: str = "", class_names: Sequence[str] = ()
    ) -> RunFolder:
        """Open the run's folder as runfolder.open_run does, or return host 0's run if it writes for all."""
        return runfolder.open_run(config, n_train, dataset, class_names)

    def begin_attempt(self, processes: Processes, number: int) -> None:
        """Begin attempt `number` with processes that are about to be started."""

    def watch(self, processes: Processes, on_message: Callable[[Any], None]) -> ExitStatus:
        """Watch the processes of the present attempt, and the other hosts too. See Processes.watch."""
        return processes.watch(on_message)

    def join_ends(
        self, exit_status: ExitStatus, step: int, moments: Sequence[Moment], resumes: bool
    ) -> JointEnd:
        """Exchange how the attempt ended on each host, and return how it ended on all.

        Args:
            exit_status: How it ended here.
            step: The last completed step here, counted from the start of the run.
            moments: Those of the memory checkpoints here, the newest last.
            resumes: Whether the run resumes after a loss, or is saved from memory when time runs out.

        Raises:
            HostFailed: Another host has ended, or a second signal ends the waiting.
        """
        return JointEnd(exit_status, step, moments[-1] if moments else None)

    def names_without(self, has: bool, number: int) -> list[str]:
        """Return which hosts don't have what attempt `number` is to start from. Raises as `join_ends`."""
        return [] if has else ["this host"]

    def bring_newest(self, config: Config, number: int) -> list[str]:
        """Bring the newest checkpoint on any host's disk to all hosts, for attempt `number`. Return notes.

        Raises:
            HostFailed: As `join_ends`.
            UserError: A checkpoint can't be read or written.
        """
        return []

    def check_start(self, run: RunFolder, number: int) -> None:
        """Raise UserError on all hosts if attempt `number` would start from different checkpoints.

        Raises as `join_ends`, too.
        """

    def await_writer(self) -> None:
        """Wait until host 0 has saved and ended, if it writes for this host."""

    def cause_of(self, failed: HostFailed) -> HostFailed:
        """Return the failure of another host that has caused this one, if it is known soon."""
        return failed

    def conclude(self, exit_status: ExitStatus) -> ExitStatus:
        """Report to other hosts how the run ended here. Return how the run as a whole ended."""
        return exit_status


@dataclasses.dataclass(frozen=True)
class _RemoteRun:
    """Host 0's run: the name of its folder, and of the record of its start, or ''."""

    folder: str
    start: str


class MultiHost(SingleHost):
    """The launcher of one of several hosts that have joined a rendezvous."""

    def __init__(self, rendezvous: Rendezvous, config: Config, interrupts: Interrupts) -> None:
        self.rendezvous, self.host_connection = rendezvous, rendezvous.host_connection
        self.host = rendezvous.host
        self._timeout, self._interrupts = config.timeout, interrupts
        self._processes: Processes | None = None
        self._reported = False
        self._number = 0  # of the present attempt
        self.heartbeat = Heartbeat(rendezvous, self._doing, config.timeout)
        self.log = log_name(self.host)
        self.writes = True

    def bring_checkpoint(self, config: Config) -> list[str]:
        # Before a host gets the checkpoint of another run.
        place = {"run_name": config.run_name, "resume_train": config.resume_train}
        agreement.agree(self.rendezvous, place, self._timeout, "place")
        shared = folders.is_shared(self.rendezvous, Path(config.weights_dir), self._timeout)
        self.writes = not shared
        notes = ["weights_dir is shared with host 0, which writes there for all hosts"] if shared else []
        if config.resume_train:
            notes.append(folders.bring_newest(self.rendezvous, config, shared))
        return list(filter(None, notes))

    def agree(self, config: Config, dataset: Dataset) -> list[str]:
        return agreement.agree(self.rendezvous, agreement.facts_of(config, dataset), self._timeout)

    def open_run(
        self, config: Config, n_train: int, dataset: str = "", class_names: Sequence[str] = ()
    ) -> RunFolder:
        run = super().open_run(config, n_train, dataset, class_names) if self.writes else None
        try:
            return self._agreed_run(run, Path(config.weights_dir))
        except BaseException:
            if run:
                run.lock.close()  # this launcher may open it again
            raise

    def _agreed_run(self, run: RunFolder | None, weights_dir: Path) -> RunFolder:
        """Return this host's run, or host 0's if that writes for all. Raises as `check_start`."""
        if self.host == 0 and run:
            start = run.start.path.with_suffix(".json").name if run.start else ""
            self.rendezvous.put("run", vars(_RemoteRun(run.folder.name, start)))
        remote = as_record(_RemoteRun, self.rendezvous.get("run", self._timeout, 0), 0, "run")
        run = run or self._run_of_host_0(weights_dir, remote)
        self.check_start(run)
        return run

    def check_start(self, run: RunFolder, number: int = 0) -> None:
        own_sha256 = run.start.state.sha256 if run.start else "nothing"
        for host, sha256 in enumerate(self._at(number).gather("start", own_sha256, self._timeout)):
            if sha256 != own_sha256:
                text = f"run_name: host {self.host} and host {host} would resume from different checkpoints"
                raise UserError(f"{text} of {run.folder.name}")

    def _run_of_host_0(self, weights_dir: Path, remote: _RemoteRun) -> RunFolder:
        names = [name for name in (remote.folder, remote.start) if name]
        if not remote.folder or any(name in (".", "..") or name != Path(name).name for name in names):
            raise refusal(0, "run", vars(remote))
        folder = weights_dir / remote.folder
        start = (
            checkpoint_files.verify_checksum(folder / "checkpoints" / remote.start) if remote.start else None
        )
        return RunFolder(folder, start, [], open(os.devnull))  # host 0 has the lock

    def begin_attempt(self, processes: Processes, number: int) -> None:
        self._processes, self._number, self.heartbeat.attempt = processes, number, number

    def watch(self, processes: Processes, on_message: Callable[[Any], None]) -> ExitStatus:
        return processes.watch(on_message, lambda: self.heartbeat.problem() or self.heartbeat.ended_attempt())

    def join_ends(
        self, exit_status: ExitStatus, step: int, moments: Sequence[Moment], resumes: bool
    ) -> JointEnd:
        apart = JointEnd(exit_status, step, None)
        kind = self._kind_of(exit_status)
        if not resumes or kind is None:
            return apart
        rendezvous, heartbeat, number = self.rendezvous, self.heartbeat, self._number
        lost = exit_status.lost
        if kind == "affected" and not await_other_end(rendezvous, heartbeat, number, FAILURE_SECONDS):
            # All its processes are well: only the connection to them is lost.
            kind, lost = "lost", f"the connection to {exit_status.awaited}"
        own = AttemptEnd(kind, self._interrupts.code, lost, exit_status.message, step, tuple(moments))
        ends = exchange_ends(rendezvous, heartbeat, number, own, self._timeout + _END_SECONDS)
        return JointEnd(_joint_status(exit_status, ends), max(e.step for e in ends), newest_common(ends))

    def _kind_of(self, exit_status: ExitStatus) -> Literal["done", "lost", "affected", "stopped"] | None:
        """Return how an attempt ended here, or None if the run ends because of that."""
        if exit_status.lost:
            return "lost"
        if exit_status.awaited:
            return "affected"
        if exit_status.is_overdue:
            # Before the first attempt's first step there is nothing to save.
            has_begun = self._processes is not None and self._processes.has_begun
            return "stopped" if has_begun or self._number else None
        return None if exit_status.message else "done"

    def names_without(self, has: bool, number: int) -> list[str]:
        values = self._at(number).gather("memory", has, self._timeout + _END_SECONDS)
        return [f"host {host}" for host, value in enumerate(values) if not value]

    def bring_newest(self, config: Config, number: int) -> list[str]:
        return list(filter(None, [folders.bring_newest(self._at(number), config, not self.writes)]))

    def _at(self, number: int) -> Rendezvous:
        """Return the rendezvous for the values of one attempt."""
        return self.rendezvous.within(f"for {attempt_key(number)}") if number else self.rendezvous

    def await_writer(self) -> None:
        if not self.writes:
            self.heartbeat.wait_for_end(0)

    def cause_of(self, failed: HostFailed) -> HostFailed:
        is_own = failed.peer == f"host {self.host}"  # a signal to this host
        return failed if is_own else self.heartbeat.wait_for_problem(FAILURE_SECONDS) or failed

    def conclude(self, exit_status: ExitStatus) -> ExitStatus:
        # Another host may soon report the failure that caused ours.
        failed = self.heartbeat.wait_for_problem(FAILURE_SECONDS) if exit_status.awaited else None
        stopped_early = not self._number and self._processes and not self._processes.has_begun
        if exit_status.code and not exit_status.message and stopped_early:
            # The message keeps other hosts from starting, too.
            exit_status = dataclasses.replace(exit_status, message=STOPPED)
        if exit_status.message and failed is None and not exit_status.message.startswith("host "):
            exit_status = dataclasses.replace(exit_status, message=f"host {self.host}: {exit_status.message}")
        if failed is None:
            self.report_end(exit_status.code, exit_status.message)
            if exit_status.message:
                return exit_status
            failed = self.heartbeat.wait_for_ends()
        if failed is None:  # all are well, or one was asked to stop
            return ExitStatus(exit_status.code or self.heartbeat.code())
        code = self._interrupts.code or failed.code
        self.report_end(code, str(failed))
        return ExitStatus(code, str(failed), awaited=failed.peer)

    def report_end(self, code: int, failure: str) -> None:
        """Report how this host ended. Only the first call counts."""
        if not self._reported:
            self.heartbeat.end(code, failure)
        self._reported = True

    def abandon(self) -> None:
        """Leave this start without a word, to join the next one (`rejoin_seconds`)."""
        self._reported = True
        self.heartbeat.abandon()

    def stop_now(self) -> None:
        """Report that a signal ended this launcher, from the signal's handler, while no processes run."""
        if not self._reported:
            self.heartbeat.end_now(self._interrupts.code, f"host {self.host}: {STOPPED}")
        self._reported = True

    def _doing(self) -> str:
        return self._processes.doing() if self._processes else "before its processes are started"


def _joint_status(exit_status: ExitStatus, ends: Sequence[AttemptEnd]) -> ExitStatus:
    """Return why an attempt ended on all hosts. exit_status: how it ended here."""
    kinds, code = [end.kind for end in ends], max(end.code for end in ends)
    if "stopped" in kinds:
        return ExitStatus(code, is_overdue=True)
    if "lost" in kinds:
        if code:  # a signal has asked the run to end: all hosts write out what is in memory
            own = exit_status if exit_status.lost else ExitStatus(1, describe_losses(ends))
            return dataclasses.replace(own, is_overdue=True)
        lost = [f"host {host}: {end.lost}" for host, end in enumerate(ends) if end.kind == "lost"]
        return ExitStatus(1, describe_losses(ends), lost=" and ".join(lost))
    return exit_status


@contextmanager
def open_hosts(
    config: Config, interrupts: Interrupts, rejoining: Rejoining | None = None
) -> Iterator[SingleHost]:
    """Join the launchers of the other hosts, if there are any, and report to them at the end of the block.

    Args:
        rejoining: The loss of a host that is waited for; None when a run starts.

    Raises:
        UserError: A host did not join in time.
        Rejoining: A host was lost, and is to be waited for.
        HostFailed: A host failed meanwhile.
    """
    if config.n_hosts == 1:
        yield SingleHost()
        return
    rendezvous = _join(config, interrupts, rejoining)
    host = MultiHost(rendezvous, config, interrupts)
    interrupts.farewell = host.stop_now
    try:
        yield host
    except Rejoining as found:
        host.abandon()
        found.store = rendezvous.served
        raise
    except HostFailed as error:
        failed = host.cause_of(error)
        if config.rejoin_seconds and isinstance(failed, HostLost):
            host.abandon()
            raise _waiting_for(failed, config, rejoining, rendezvous.served) from None
        host.report_end(failed.code, str(failed))
        raise failed from None
    except (UserError, PeerProblem) as error:
        host.report_end(error.code, f"host {host.host}: {error}")
        raise
    finally:
        # Counts only if nothing was reported before.
        host.report_end(1, f"host {host.host}: its launcher has failed")
        host.heartbeat.leave()


def with_hosts(config: Config, interrupts: Interrupts, run: Callable[[SingleHost], int]) -> int:
    """Run a program with the other hosts, again after a lost host came back.

    Args:
        run: The program. It returns the exit code, or raises Rejoining.

    Raises:
        UserError: A host did not join in time.
        PeerProblem: Another host has failed, or did not come back in time.
    """
    rejoining: Rejoining | None = None
    while True:
        try:
            with open_hosts(config, interrupts, rejoining) as host:
                return run(host)
        except Rejoining as found:
            rejoining = found.with_traceback(None)  # its frames hold the memory and the lock of the run
            rejoining.__context__ = None


def _waiting_for(
    lost: HostLost, config: Config, rejoining: Rejoining | None, served: Store | None
) -> Rejoining:
    """Return the exception that waits for a host that was lost in a start, and say so.

    Args:
        rejoining: The loss before this start, whose deadline stays; None if the run starts.
        served: The store that this launcher serves, or None.
    """
    show(f"{lost}; waiting for it to come back", "stdout")
    deadline = rejoining.deadline if rejoining else time.monotonic() + config.rejoin_seconds
    return Rejoining(lost, deadline, served)


def _join(config: Config, interrupts: Interrupts, rejoining: Rejoining | None) -> Rendezvous:
    """Join the other hosts; after the loss of one, wait for it. Raises as `open_hosts`."""
    assert config.host_rank is not None and config.rendezvous is not None, "checked"
    served, seconds = None, config.timeout
    if rejoining:
        lost, served = rejoining.lost.peer, rejoining.store
        seconds = max(0.0, rejoining.deadline - time.monotonic())
        interrupts.farewell = None
        interrupts.leave(f"stopped as asked, while {lost} was waited for; resume_train resumes it")
    elif config.rejoin_seconds:
        _check_rejoining(config)
    if config.host_rank == 0 and served is None and not torchrun_has_store():
        served = serve(config.rendezvous)
    try:
        return join_rendezvous(
            config.n_hosts,
            config.host_rank,
            config.rendezvous,
            config.host_address,
            seconds,
            interrupts,
            served,
            joins_again=config.rejoin_seconds > 0,
        )
    except HostLost as lost_again:
        if config.rejoin_seconds and seconds:
            raise _waiting_for(lost_again, config, rejoining, served) from None
        raise
    except UserError as error:
        if rejoining is None:
            raise
        text = f"{rejoining.lost}; it has not come back within {config.rejoin_seconds:g} s: {error}"
        raise PeerProblem(rejoining.lost.peer, text) from error


def _check_rejoining(config: Config) -> None:
    if torchrun_has_store():
        raise UserError("rejoin_seconds: torchrun starts all launchers again: leave rejoin_seconds out")
    if config.resume_train != "auto":
        raise UserError(
            f"rejoin_seconds: a launcher that is started again has to resume the run: set resume_train: auto "
            f"on all hosts, not {str(config.resume_train).lower()}"
        )


def leave(code: int, template: Template) -> None:
    """Exit with a code at once, even if threads still wait for a host that does not answer.

    The template is waited for: not every process 1, as in some containers, does that for orphans.
    """
    ignore_signals()
    template.close()
    if "torch" not in sys.modules:  # no other host has been joined
        sys.exit(code)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
