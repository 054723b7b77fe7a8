"""Resuming after a process was lost (`on_failure`), from the newest checkpoint in memory or on disk."""

import dataclasses
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.comm.messages import Tick
from lockstep.config import Config
from lockstep.config.rules import on_failure_of
from lockstep.data.dataset import Dataset
from lockstep.data.sampling import steps_done
from lockstep.errors import PeerProblem, UserError
from lockstep.hosts.store import HostFailed, HostLost
from lockstep.launch.attempts import (
    DAMAGED,
    Attempt,
    Context,
    FailedAttempt,
    clean_folder,
    next_attempt,
    orders_of,
    resume,
    retains,
)
from lockstep.launch.children import ExitStatus
from lockstep.launch.console import Console
from lockstep.launch.hosting import JointEnd, Rejoining
from lockstep.launch.processes import Processes
from lockstep.launch.resize_handler import ResizeHandler
from lockstep.memory.host import HostBlock
from lockstep.runs.checkpoint_files import read_state, records, verify_checksum
from lockstep.runs.folder import keep_settings, lock_if_free
from lockstep.runs.network_source import RunSources
from lockstep.runs.snapshot import MemoryCheckpoint, Retained
from lockstep.signals import Interrupts

_RESERVE_SECONDS = 1.0  # to write a memory checkpoint, and for each so many bytes:
_BYTES_PER_SECOND = 100e6


class Recovery:
    """The launcher's record of a run's memory checkpoint, its failures and its progress.

    Args:
        console: Gets a line and an event for each recovery.
        dataset: The run's, to count steps.
        attempt: The first one.
        context: The launcher's.
    """

    def __init__(self, console: Console, dataset: Dataset, attempt: Attempt, context: Context) -> None:
        self._console, self._dataset, self._context = console, dataset, context
        self._failures, self._folder = context.failures, attempt.run.folder
        self._failures.is_counted = False
        self._sources = RunSources(attempt.config)
        self._resizing = ResizeHandler(self._folder, console, self._sources)
        self._blocks: list[HostBlock] = []  # memory files; the last one is that of the present trainer 0
        self._memory: list[Retained] = []  # the newest last; over several hosts the one before it, too
        self._retained_at = 0.0  # when the newest memory checkpoint was complete (monotonic clock)

    def take(self, attempt: Attempt, message: Any) -> bool:
        """Handle a message of trainer 0. Return whether it was for this object only."""
        if isinstance(message, Tick) and self._failures.unresolved:
            self._report(attempt, self._failures.unresolved)
        if isinstance(message, Tick) and attempt.config is self._resizing.config:
            self._resizing.finish(self._first_step(attempt))
        if isinstance(message, HostBlock):
            self._keep([*dict.fromkeys(each.block for each in self._memory), message])
        elif isinstance(message, MemoryCheckpoint):
            self._retain(message)
        return isinstance(message, HostBlock | MemoryCheckpoint)

    def keep_settings(self, attempt: Attempt) -> None:
        """Write the settings of an attempt whose training has begun.

        A full disk does not end a run that has recovered. Raises UserError in the first attempt.
        """
        try:
            start = attempt.state.name if attempt.state else ""
            keep_settings(self._folder, attempt.config, self._dataset.description, start)
        except UserError as error:
            if attempt.number == 0:
                raise
            self._console.say(f"note: {error}")

    def next(
        self, attempt: Attempt, exit_status: ExitStatus, last_step: tuple[int, int]
    ) -> tuple[ExitStatus, Attempt | None]:
        """Return how an attempt ended, on all hosts, and the attempt that resumes the run; None if it ends.

        If the run can't resume as `on_failure` asks, or can't be saved in time, the exit status says why.

        Args:
            exit_status: How it ended here.
            last_step: Epoch and step of the last step that the attempt has completed here.

        Raises:
            Rejoining: Another host's launcher was lost, and is to be waited for.
        """
        step = max(self._count(attempt.config, *last_step), self._first_step(attempt))
        try:
            exit_status, found = self._next(attempt, exit_status, step)
            if found:
                self._check_sources(found)
                self._begin(found)
            return exit_status, found
        except UserError as error:
            return exit_status.followed_by(str(error)), None
        except HostFailed as failed:
            return self._without_host(attempt, exit_status, step, failed), None

    def _without_host(
        self, attempt: Attempt, exit_status: ExitStatus, step: int, failed: HostFailed
    ) -> ExitStatus:
        """Save what is only in memory, after the failure of another host. Return how the run ends.

        Raises:
            Rejoining: The other host is to be waited for.
        """
        interrupts = self._context.interrupts
        failed = self._context.host.cause_of(failed)
        if interrupts.at_once:
            return ExitStatus.stopped_by(interrupts)
        if exit_status.code:  # else the run is complete
            self._save(attempt, lost_writer=failed.peer == "host 0")
        if isinstance(failed, HostLost) and self._rejoins(attempt, exit_status, step):
            self._begin_rejoining(attempt, failed, step)
            raise Rejoining(failed, time.monotonic() + attempt.config.rejoin_seconds) from None
        if exit_status.message and not exit_status.awaited:  # this host's own failure
            return exit_status
        return ExitStatus(interrupts.code or failed.code, str(failed), awaited=failed.peer)

    def _next(
        self, attempt: Attempt, exit_status: ExitStatus, step: int
    ) -> tuple[ExitStatus, Attempt | None]:
        host, config = self._context.host, attempt.config
        resumes = on_failure_of(config) != "stop" or config.preempt_seconds is not None
        end = host.join_ends(exit_status, step, [each.checkpoint.moment for each in self._memory], resumes)
        exit_status = end.exit_status
        if failure := self._failures.unresolved:  # the run had not made a step since
            if exit_status.code:
                self._console.say(f"lockstep: {failure.exit_status.message}", "stderr")
            else:
                self._report(attempt, failure)
        code = self._context.interrupts.code if config.n_hosts == 1 else 0  # several hosts have agreed on it
        if code and exit_status.is_paused:  # the signal came after the trainers had paused
            exit_status = dataclasses.replace(exit_status, code=code, is_overdue=True)
        if exit_status.is_overdue or (code and exit_status.lost):
            self._write_out(attempt)
            if exit_status.message:
                self._context.host.await_writer()
                saved = f"stopped as asked; {self._console.describe_saved()}"
                exit_status = exit_status.followed_by(saved)
        if code or exit_status.is_overdue:
            if self._resizing.before is not None:
                self._resizing.refuse("the run was asked to stop")
            return exit_status, None
        if self._resizing.before is not None:
            return exit_status, self._next_after_resizing(attempt, exit_status, end)
        found = self._next_after_failure(attempt, end) if exit_status.lost else None
        # Without a step since, an attempt that could not be started has left no error in the memory.
        is_sound = exit_status.lost or (attempt.retained and end.step == self._first_step(attempt))
        if exit_status.code and not found and is_sound and not exit_status.is_faulty:
            self._save(attempt)
        return exit_status, found

    def may_restart_loader(self) -> bool:
        """Return whether a loader that is started again imports the files that the others have imported."""
        return not self._sources.describe_change("augmentation", "data")

    def _check_sources(self, attempt: Attempt) -> None:
        """Raise UserError if a file was edited, with which the run would not be the same training."""
        if changed := self._sources.describe_change():
            self._write_out(attempt)
            text = "Restore it, or keep it, and resume the run: resume_train=true"
            raise UserError(f"the run can't resume: {changed}. {text}")

    def _begin(self, attempt: Attempt) -> None:
        """Keep the memory file from which an attempt starts. Close all others."""
        self._keep([attempt.retained.block] if attempt.retained else [])
        self._failures.is_counted = False

    def _keep(self, blocks: list[HostBlock]) -> None:
        """Close all memory files but these."""
        for block in self._blocks:
            if block not in blocks:
                block.close()
        self._blocks = blocks

    def _next_after_failure(self, attempt: Attempt, end: JointEnd) -> Attempt | None:
        n_before = self._failures.add(end.exit_status, end.step)
        event = {"lost": end.exit_status.lost, "failure": end.exit_status.message, "step": end.step}
        self._console.log("lost", event)
        common = [each for each in self._memory if each.checkpoint.moment == end.moment]
        newest = common[-1] if common else None
        try:
            found = next_attempt(attempt, end.exit_status, n_before, newest, self._context.host)
            if found:
                self._memory = [found.retained] if found.retained else []
                self._write_due(found)
        except UserError as error:
            raise UserError(f"the run can't resume: {error}") from error
        return found

    def _write_due(self, attempt: Attempt) -> None:
        """Write the checkpoint on the disk that a lost trainer was writing. Raises as `_write_out`."""
        if attempt.retained and attempt.retained.checkpoint.to_disk:
            self._write_out(attempt)

    def _record_of(self, retained: Retained) -> Path:
        """Return the JSON file that a memory checkpoint has on the disk, once it exists."""
        return self._folder / "checkpoints" / f"{retained.state().name}.json"

    def _on_disk(self, retained: Retained) -> Path | None:
        """Return the newest whole checkpoint on the disk, unless a memory checkpoint is newer.

        A trainer may have written it and been ended before it said so. Damaged ones are passed over, as when
        a run resumes.
        """
        for record in reversed(records(self._folder)):
            with suppress(UserError):
                is_older = read_state(record).moment < retained.checkpoint.moment
                return None if is_older else verify_checksum(record).path
        return None

    def is_to_pause(self, attempt: Attempt) -> bool:
        """Return whether the trainers are to pause, because the run is to resume on other devices."""
        is_ready = retains(attempt.config) and attempt.config.n_hosts == 1
        return self._resizing.is_asked(attempt.config, is_ready)

    def _next_after_resizing(
        self, attempt: Attempt, exit_status: ExitStatus, end: JointEnd
    ) -> Attempt | None:
        """Return the attempt on other devices, or on those before if the run can't start on the others."""
        before, config = self._resizing.before, self._resizing.config
        assert before and config
        resumes = exit_status.is_paused or (attempt.config is config and exit_status.code)
        if resumes and self._memory and not self._memory[-1].is_whole():
            status = ExitStatus(1, f"the memory checkpoint {DAMAGED}", lost="the memory checkpoint")
            self._resizing.refuse(status.message)
            self._failures.add(status, end.step)
            self._memory = []
            return resume(attempt, before, None, self._context.host)
        if exit_status.is_paused and self._memory:
            return Attempt(config, attempt.run, self._memory[-1], attempt.number + 1)
        if attempt.config is config and exit_status.code and self._memory and not exit_status.is_faulty:
            self._resizing.refuse(exit_status.message)
            return Attempt(before, attempt.run, self._memory[-1], attempt.number + 1)
        self._resizing.refuse("the run has ended" if not exit_status.code else exit_status.message)
        return self._next_after_failure(attempt, end) if exit_status.lost else None

    def _retain(self, checkpoint: MemoryCheckpoint) -> None:
        """Add a memory checkpoint, which may be in another memory file and replaces that of its slot."""
        assert self._blocks, "trainer 0 shares its memory first"
        block = self._blocks[-1]
        self._keep([block])
        self._memory = [
            each for each in self._memory if each.block is block and each.checkpoint.slot != checkpoint.slot
        ]
        self._memory.append(Retained(block, checkpoint))
        self._retained_at = time.monotonic()

    def is_overdue(self, config: Config, interrupts: Interrupts) -> bool:
        """Return whether a preempted run has no time left for more than writing out its memory checkpoint.

        A memory checkpoint of the last step is newer than the signal, and is being written. Once it is on the
        disk, the trainers should leave; they do not if another step follows it and hangs.
        """
        if config.preempt_seconds is None or not interrupts.code or not self._memory:
            return False
        newest, is_after_signal = self._memory[-1], self._retained_at > interrupts.since
        if is_after_signal and newest.checkpoint.to_disk and not self._record_of(newest).exists():
            return False
        reserve = _RESERVE_SECONDS + newest.block.n_bytes / _BYTES_PER_SECOND
        left = interrupts.since + config.preempt_seconds - time.monotonic()
        return left < min(reserve, config.preempt_seconds / 2)

    def _rejoins(self, attempt: Attempt, exit_status: ExitStatus, step: int) -> bool:
        """Return whether the run waits for a launcher that was lost."""
        config, is_done = attempt.config, not exit_status.code
        n_before = self._failures.n_before(step)
        may_fail = on_failure_of(config) != "stop" and n_before < config.max_restarts
        return config.rejoin_seconds > 0 and may_fail and not is_done and not self._context.interrupts.code

    def _begin_rejoining(self, attempt: Attempt, lost: HostLost, step: int) -> None:
        """Log the loss, and release the memory files and the run's folder."""
        status = ExitStatus(lost.code, str(lost), lost=f"{lost.peer}: its launcher")
        self._failures.add(status, step)
        seconds = f"{attempt.config.rejoin_seconds:g} s"
        self._keep([])
        self._memory = []
        self._console.log("waiting", {"lost": status.lost, "failure": status.message, "step": step})
        self._console.close(f"{status.message}; waiting up to {seconds} for it to come back", "stdout")
        attempt.run.lock.close()

    def _save(self, attempt: Attempt, lost_writer: bool = False) -> None:
        """Do as `_write_out`, and say why if nothing can be written.

        Args:
            lost_writer: Whether the host that writes for all was lost.
        """
        try:
            is_written = self._write_out(attempt)
        except UserError as error:
            self._console.say(f"note: {error}")
            return
        if lost_writer and not is_written:
            text = "another host has its lock, so this one saves nothing there"
            self._console.say(f"note: {attempt.run.folder}: {text}")

    def _write_out(self, attempt: Attempt) -> bool:
        """Write the memory checkpoint to the disk, in a process that no signal stops.

        Nothing is written if it, or a newer one, exists.

        Where hosts share the folder, host 0 does so for all, or one of the others if host 0 has ended.

        Returns:
            Whether it is on the disk then, or there is none.

        Raises:
            UserError: It is damaged, or can't be written.
        """
        if not self._memory:
            return True
        if self._context.host.writes:
            self._write(attempt, self._memory[-1])
            return True
        if (lock := lock_if_free(attempt.run.folder)) is None:
            return False
        with lock:
            self._write(attempt, self._memory[-1])
        return True

    def _write(self, attempt: Attempt, newest: Retained) -> None:
        folder = attempt.run.folder
        if not newest.is_whole():
            raise UserError(f"{folder}: the memory checkpoint is damaged, so only older ones are on the disk")
        if path := self._on_disk(newest):
            self._console.take_saved(path)
            return
        exit_status = self._run_writer(attempt, newest)
        if exit_status.lost:  # once more, because nothing else has what is in the memory
            exit_status = self._run_writer(attempt, newest)
        if exit_status.code:
            raise UserError(exit_status.message)

    def _run_writer(self, attempt: Attempt, newest: Retained) -> ExitStatus:
        """Write a memory checkpoint in a process of its own. Raises as `_write_out`."""
        template, folder = self._context.template, attempt.run.folder
        if self._context.host.writes:  # otherwise the lock was taken now, which has done so
            clean_folder(folder)
        with Processes(attempt.config.timeout, template=template, passes_on_sigterm=True) as processes:
            try:
                processes.start("the writer", "lockstep.trainer.saving:write_out", (newest, folder))
            except PeerProblem as problem:  # no template starts any more
                raise UserError(str(problem)) from problem
            return processes.watch(self._console.take)

    def _report(self, attempt: Attempt, failure: FailedAttempt) -> None:
        """Print and log a recovery, at the first step after it."""
        self._failures.unresolved = None
        first, seconds = self._first_step(attempt), time.monotonic() - failure.time
        n_repeated = failure.step - first
        event = {
            "lost": failure.exit_status.lost,
            "failure": failure.exit_status.message,
            "step": failure.step,
            "source": attempt.source,
            "steps_repeated": n_repeated,
            "trainers": attempt.config.n_trainers,
            "seconds": round(seconds, 3),
        }
        self._console.log("recovered", event)
        notes = "".join(f"; {note}" for note in attempt.run.notes)
        self._console.say(
            f"recovered: {failure.exit_status.message}; resumed from {attempt.source} at step {first} with "
            f"{attempt.config.n_trainers} trainer(s) in {seconds:.2f} s, {n_repeated} step(s) again{notes}"
        )

    def _first_step(self, attempt: Attempt) -> int:
        """Return the number of steps before an attempt's first, counted from the start of the run."""
        state = attempt.state
        if state is None:
            return 0
        orders = orders_of(attempt.config, self._dataset)
        n_samples = orders.n_images("train")
        position = n_samples if state.is_complete else state.position
        return steps_done(state.epoch, position, n_samples, orders.step_size("train"))

    def _count(self, config: Config, epoch: int, step: int) -> int:
        """Return a step's number from the start of the run, by its epoch and its number there."""
        return max(0, epoch - 1) * orders_of(config, self._dataset).n_steps("train") + step
