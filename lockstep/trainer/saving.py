"""Checkpoints in memory and on disk, made in the background of training.

At the end of a step trainer 0 copies weights and optimizer state into a slot of a memory file, and training
resumes. A GPU copies while the trainer asks for the next steps. A thread completes the slot, which is then a
memory checkpoint, and writes it to the disk if that is due. There is one write at a time. An error in the
thread is raised in the trainer, after the step in which it was noticed.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.group import World
from lockstep.comm.messages import Order, Saved, Stop
from lockstep.comm.pipes import Pipe
from lockstep.config.tasks import monitor_of
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.launch.status import StatusBoard
from lockstep.network.program import Program
from lockstep.network.recorder import HostStopwatch, Stopwatch
from lockstep.runs import checkpoint
from lockstep.runs.metrics import best_epoch
from lockstep.runs.plan import RunPlan
from lockstep.runs.retention import is_regular, remove_older, remove_superseded
from lockstep.runs.snapshot import MemoryCheckpoint, Retained, SnapshotMemory, Snapshots
from lockstep.runs.state import State
from lockstep.trainer.progress import ProgressReporter
from lockstep.trainer.receipts import ReceiptKeeper, add_missing, add_written_out

_SHARE_OF_TIME = 0.01  # for memory checkpoints, with memory_checkpoint_seconds: auto
_LEAST_SECONDS = 0.2  # between memory checkpoints, with auto


def wants_disk(control: Pipe) -> bool:
    """Return whether a run that stops is to be saved on the disk, as the launcher's message says."""
    return not control.poll() or control.receive(Stop, "why to stop").to_disk


def interval(cost: float, failure_seconds: float | None) -> float:
    """Return the seconds between memory checkpoints, with `auto`.

    They take up to 1 % of the time, or more where failures are so frequent that repeated steps would cost
    more: Young's interval, sqrt(2 x cost x time between failures). Young 1974, "A first order approximation
    to the optimum checkpoint interval", Communications of the ACM 17 (9).

    Args:
        cost: Seconds of one memory checkpoint.
        failure_seconds: The mean time between failures; None before the first.
    """
    seconds = cost / _SHARE_OF_TIME
    if failure_seconds is not None:
        seconds = min(seconds, math.sqrt(2 * cost * failure_seconds))
    return max(_LEAST_SECONDS, seconds)


@dataclass(frozen=True)
class _Copying:
    """A copy that the device is making.

    Attributes:
        begin, end: Points in the device's work.
        write: Starts what follows the copy, in the thread.
    """

    begin: Any
    end: Any
    write: Callable[[], None]


class Saver:
    """A writer of checkpoints. Only trainer 0 of each host copies and writes; on others it does nothing.

    On a host that shares its folder with host 0, trainer 0 makes memory checkpoints only.

    Args:
        dataset: The run's.
        world: This trainer among all.
        rule_bytes: Bytes of the rule's tensors in a checkpoint.
        stopwatch: Of the trainer's device; by default of a CPU.

    Raises:
        UserError: The disk or the memory has no room for a checkpoint, or the file of receipts can't be used.
    """

    def __init__(
        self,
        plan: RunPlan,
        program: Program,
        reporter: ProgressReporter,
        dataset: Dataset,
        *,
        world: World,
        rule_bytes: int = 0,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._plan, self._config, self._world = plan, plan.config, world
        self._stopwatch = stopwatch or HostStopwatch()
        self._program, self._reporter, self._dataset = program, reporter, dataset
        self._is_writer = world.local_rank == 0 and plan.writes
        self._copies = world.local_rank == 0 and (plan.writes or plan.retains)
        self._receipts = self._open_receipts()
        self._thread = ThreadPoolExecutor(1, "saving")
        self._copying: _Copying | None = None
        self._digesting: Future[MemoryCheckpoint] | None = None
        self._pending: Future[Path | None] | None = None
        self._last_save = self._last_copy = time.monotonic()  # or the start of the run
        self._pause_seconds = 0.0  # that the fastest checkpoint within an epoch held up the trainer
        self._copy_seconds = 0.0  # that the fastest copy took the device
        if self._is_writer and not plan.retained:  # a recovering run continues, also if the disk is full now
            _check_disk(plan.folder, program.arena.flat.nbytes + rule_bytes)
        if self._copies:
            n_slots = 2 if plan.retains else 1
            n_validations = -(-self._config.n_epochs // self._config.val_freq)
            self._slots = Snapshots(
                program.arena, rule_bytes, n_slots, world.size, n_validations, plan.retained
            )
            if plan.retains and self._slots.is_new:
                reporter.share(SnapshotMemory(), self._slots.block)
        if plan.retained and (not self._copies or self._slots.is_new):  # else it is written to again
            plan.retained.block.close()

    def is_due(self) -> bool:
        """Return whether a checkpoint is due by `checkpoint_minutes`. Call it at every step.

        No checkpoint is due while another one is being written, so training does not wait for a slow disk. A
        finished write is reported here. After a failed write the answer is True: `save` then raises the
        error, once the losses have been examined.
        """
        self._poll_copy()
        if self._digesting and self._digesting.done():
            self._report_copy(self._digesting)
        if self._pending and self._pending.done():
            if self._pending.exception():
                return True
            self._report(self._pending)
        minutes = self._config.checkpoint_minutes if self._is_writer else None
        if minutes is None or self._copying or self._pending:
            return False
        return time.monotonic() - self._last_save >= 60 * minutes

    def is_due_after(self, epoch: int, val_record: list[dict[str, float]]) -> bool:
        """Return whether a complete epoch is saved: every `snapshot_freq` epochs, the last, and the best."""
        return self._is_regular(epoch) or self._is_best(epoch, val_record)

    def _is_regular(self, epoch: int) -> bool:
        return is_regular(epoch, self._config.snapshot_freq, self._config.n_epochs)

    def _is_best(self, epoch: int, val_record: list[dict[str, float]]) -> bool:
        return best_epoch(val_record, monitor_of(self._config)) == epoch

    def _open_receipts(self) -> ReceiptKeeper | None:
        """Return what keeps receipts, with `logical_ranks`; None in a trainer that writes none."""
        if not (self._is_writer and self._config.logical_ranks):
            return None
        is_recovery = self._plan.retained is not None
        if self._plan.start or is_recovery:
            add_missing(self._plan.folder)
        return ReceiptKeeper(self._plan.folder, self._config, self._dataset, is_recovery)

    def begin_receipts(self, save: Callable[[bool, bool], None]) -> None:
        """Add the first receipt, with `logical_ranks`. All trainers call it before the first step.

        Args:
            save: Calls `save` with its arguments as `to_disk` and `receipt`, in all trainers.

        Raises:
            UserError: The receipt can't be written.
        """
        if self._config.logical_ranks:
            save(False, True)

    def is_receipt_due(self, order: Order, n_steps: int) -> bool:
        """Return whether a receipt follows this step: every `check_every` steps, with `logical_ranks`.

        All trainers get the same answer, and then call `save`.

        Args:
            order: The step's last minibatch.
            n_steps: Steps per epoch.
        """
        config, n_done = self._config, (order.epoch - 1) * n_steps + order.step
        return bool(config.logical_ranks and config.check_every) and n_done % (config.check_every or 1) == 0

    def is_copy_due(self) -> bool:
        """Return whether a memory checkpoint is due by `memory_checkpoint_seconds`.

        None is due while a slot is being written, or written to the disk.
        """
        is_busy = self._copying or self._digesting or self._pending
        if not (self._copies and self._plan.retains) or is_busy:
            return False
        seconds = self._config.memory_checkpoint_seconds
        if seconds == "auto":
            cost = max(self._pause_seconds, self._copy_seconds)
            seconds = interval(cost, self._plan.failure_rate.mean_seconds())
        return seconds is not None and time.monotonic() - self._last_copy >= seconds

    def save(
        self,
        epoch: int,
        position: int,
        val_record: list[dict[str, float]],
        rule_state: dict[str, torch.Tensor],
        to_disk: bool = True,
        receipt: bool = False,
    ) -> None:
        """Copy the state of training and start to write it to the disk, after any earlier write.

        Args:
            epoch: The current epoch, from 1.
            position: Samples of the epoch that have been trained on.
            val_record: Validation results so far; copied.
            rule_state: The rule's tensors.
            to_disk: Whether it is written to the disk; if not, it is a memory checkpoint or a receipt.
            receipt: Whether it gets a receipt, which those on the disk have in any case.

        Raises:
            UserError: As `finish` does.
        """
        self.finish()
        if not self._copies:
            return
        started, begin = time.monotonic(), self._stopwatch.now()
        self._name = f"the checkpoint of epoch {epoch} at image {position}"
        copies = self._slots.copy({**rule_state, **self._program.arena.outside()})
        make_state = partial(
            State.now,
            epoch=epoch,
            position=position,
            n_samples=len(self._dataset.train),
            learning_rate=self._program.optimizer.learning_rate,
            val_record=list(val_record),
            n_trainers=self._world.size,
            config=self._config,
            dataset=self._dataset.digest,
            only_best=not self._is_regular(epoch) and self._is_best(epoch, val_record),
        )
        if to_disk and self._is_writer:
            self._last_save = started
        self._last_copy = time.monotonic()
        moment = (epoch, position) if receipt else None
        write = partial(self._start_writing, copies, make_state, to_disk, moment)
        self._copying = _Copying(begin, self._stopwatch.now(), write)
        self._poll_copy()

    def _poll_copy(self) -> None:
        """Start what follows a copy, if the device has made it."""
        if self._copying and self._stopwatch.is_past(self._copying.end):
            self._end_copy(self._copying)

    def _start_writing(
        self,
        copies: dict[str, torch.Tensor],
        make_state: Callable[[], State],
        to_disk: bool,
        receipt: tuple[int, int] | None,
    ) -> None:
        """Start in the thread what `save` was asked for, when the copies are made.

        Args:
            copies: The tensors.
            make_state: Makes the rest of a checkpoint.
            to_disk: Whether they are written to the disk.
            receipt: The epoch and position of a receipt that is asked for.
        """
        if self._plan.retains:
            self._digesting = self._thread.submit(self._complete, make_state, to_disk)
        if to_disk and self._is_writer:
            self._pending = self._thread.submit(self._write, copies, make_state)
        elif receipt and self._receipts:
            self._pending = self._thread.submit(self._add_receipt, *receipt, copies)

    def _end_copy(self, copying: _Copying) -> None:
        """Wait for the device's copy, and start what follows it."""
        self._copying = None
        seconds = self._stopwatch.seconds_between(copying.begin, copying.end)
        self._copy_seconds = min(self._copy_seconds or seconds, seconds)
        copying.write()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what checkpoints cost, for memory_checkpoint_seconds: auto. The block makes one.

        The least time counts, because waits for busy cores and other hosts are no cost of a checkpoint.
        """
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        self._pause_seconds = min(self._pause_seconds or seconds, seconds)

    def finish(self) -> None:
        """Wait for the pending write.

        Raises:
            UserError: The write failed, or took longer than `timeout`.
        """
        if self._copying:
            self._end_copy(self._copying)
        if self._digesting:
            self._await(self._digesting)
            self._report_copy(self._digesting)
        if self._pending:
            self._await(self._pending)
            self._report(self._pending)

    def _await(self, future: "Future[Any]") -> None:
        seconds = self._config.timeout  # in slices, of which a suspended run (Ctrl-Z) loses at most one
        if not any(wait([future], 1.0).done for _ in range(math.ceil(seconds))):
            raise UserError(
                f"{self._plan.folder}: {self._name} is not written after {seconds:g} s: "
                "the disk is slow or hangs. Raise timeout to wait longer."
            )

    def _report_copy(self, completed: "Future[MemoryCheckpoint]") -> None:
        """Tell the launcher of a whole memory checkpoint."""
        self._digesting = None
        self._reporter.send(completed.result())

    def _report(self, written: "Future[Path | None]") -> None:
        """Report a finished write to the launcher, or raise its error. A mere receipt is not reported."""
        self._pending = None
        path = written.result()
        if path:
            self._reporter.send(Saved(str(path)))

    def _add_receipt(self, epoch: int, position: int, tensors: dict[str, torch.Tensor]) -> None:
        """Add the receipt of a state that is not written."""
        assert self._receipts
        self._receipts.add(epoch, position, checkpoint.digest_of(tensors))

    def _complete(self, make_state: Callable[[], State], to_disk: bool) -> MemoryCheckpoint:
        return self._slots.complete(make_state(), to_disk)

    def _write(self, tensors: dict[str, torch.Tensor], make_state: Callable[[], State]) -> Path:
        if not self._slots.flat.isfinite().all():
            raise UserError(_not_finite(tensors, self._name))
        path = checkpoint.save(self._plan.folder, tensors, make_state())
        if self._receipts:
            self._receipts.add_checkpoint(path)
        remove_superseded(path)
        if self._config.keep_checkpoints is not None:
            remove_older(path, self._config.keep_checkpoints)
        return path


def _not_finite(tensors: dict[str, torch.Tensor], what: str) -> str:
    """Return the message about a checkpoint of these tensors that must not be written."""
    names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()] or ["a number"]
    text = f"{names[0]} is not finite in {what}: lower learning_rate"
    if all(name.startswith("buffers/") for name in names):
        text += ". If the network makes this buffer so, as a mask, give it -1e9 instead of -inf"
    return text


def _check_disk(folder: Path, n_bytes: int) -> None:
    """Raise UserError if the disk has no room for one more checkpoint: hours later would be too late."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:  # the folder may have been removed meanwhile
        raise UserError(f"{folder}: can't be used: {error.strerror} (weights_dir in the config)") from error
    if n_bytes > free:
        raise UserError(
            f"{folder}: a checkpoint takes {n_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free on its "
            "disk: make room, or set weights_dir to a folder on another disk"
        )


def write_out(control: Pipe, board: StatusBoard, retained: Retained, folder: Path) -> None:
    """Write a memory checkpoint into the run's folder. The main function of a process.

    Raises:
        UserError: The disk is full or can't be written.
    """
    board.say("writing the memory checkpoint to the disk")
    tensors, state = retained.tensors(), retained.state()
    path = checkpoint.save(folder, tensors, state)
    add_written_out(folder, path)
    control.send(Saved(str(path)))
