"""Progress messages from a host's first trainer to the launcher."""

import math
import time
from typing import Any

from lockstep.backends.devices import on_gpus
from lockstep.comm.messages import Order, Progress, Tick, WarningMessage
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.augmentation import crop_of
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.memory import Block
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.sync import Rule
from lockstep.trainer.coordinator import Coordinator
from lockstep.trainer.straggler_watch import StragglerWatch

TICK_SECONDS = 0.25
_N_COST_STEPS = 4  # steps after which network cost is estimated, without the first, which takes longer


class ProgressReporter:
    """A sender of messages to the launcher. Only trainer 0 of each host sends; others do nothing.

    Args:
        control: The pipe to the launcher.
        recorder: The sums and times since the last line of progress.
    """

    def __init__(self, control: Pipe, coordinator: Coordinator, config: Config, recorder: Recorder) -> None:
        self._control, self._coordinator, self._config, self._recorder = (
            control,
            coordinator,
            config,
            recorder,
        )
        self._stragglers = StragglerWatch(coordinator, recorder)
        self._ticked_at = self._first_compute = 0.0
        self.begin()

    def begin(self) -> None:
        """Start the interval that the next line of progress covers."""
        self._is_overdue = False
        self._recorder.reset()
        self._begin = time.perf_counter()

    def send(self, message: Any) -> None:
        """Send a message to the launcher, if this is the host's trainer 0."""
        if self._coordinator.world.local_rank == 0:
            self._control.send(message)

    def share(self, message: Any, block: Block) -> None:
        """Send a message and the handle of a block to the launcher, if this is the host's trainer 0."""
        if self._coordinator.world.local_rank == 0:
            self._control.send(message)
            block.send(self._control)

    def warn(self, *texts: str) -> None:
        """Send lines for the user; empty ones are left out."""
        for text in filter(None, texts):
            self.send(WarningMessage(text))

    def tick(self, order: Order, n_steps: int) -> None:
        """Count a step that has ended: move the bar now and then, and estimate the network's cost once.

        Args:
            order: The last batch of the step.
            n_steps: Steps per epoch.
        """
        self._is_overdue |= self._is_line_step(order, n_steps)
        now = time.perf_counter()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self.send(Tick(order.stage, order.epoch, order.step, n_steps, self._loss_so_far(order)))
        n_done = self._recorder.n_steps
        if n_done in (1, _N_COST_STEPS) and self._coordinator.has_cost:
            compute = self._recorder.stopwatch.seconds()["compute"]
            if n_done == 1:
                self._first_compute = compute
            else:
                self._warn_of_cost((compute - self._first_compute) / (n_done - 1))

    def _loss_so_far(self, order: Order) -> float | None:
        """Return trainer 0's mean loss since the last line; None on GPUs, which it would stall."""
        if order.stage == "val" or on_gpus(self._config.devices):
            return None
        loss_sum, _, n_images, _ = self._recorder.sums()
        return loss_sum / n_images if n_images else None

    def is_due(self, order: Order, n_steps: int, n_samples: int, synchronizes: bool) -> bool:
        """Return whether a line of progress follows this step: each print_freq steps, or a short epoch's end.

        Args:
            order: The last batch of the step.
            n_steps: Steps per epoch.
            n_samples: Samples per epoch.
            synchronizes: Whether the trainers synchronize after this step. A line that falls on another step
                is overdue until they do.
        """
        ends_short_epoch = self._config.is_short(n_steps) and order.stop == n_samples
        is_line_step = ends_short_epoch or self._is_line_step(order, n_steps)
        return synchronizes and (is_line_step or self._is_overdue)

    def _is_line_step(self, order: Order, n_steps: int) -> bool:
        return not self._config.is_short(n_steps) and order.step % self._config.print_freq == 0

    def report(self, order: Order, n_steps: int, learning_rate: float, sums: list[list[float]]) -> None:
        """Send a line of progress. All trainers call it, since it gathers their times.

        Args:
            sums: Every trainer's recorded sums since the last line, all finite: loss, number of wrong
                answers, number of images, number of finite losses.
        """
        loss_sum, n_wrong, n_images, _ = (sum(column) for column in zip(*sums, strict=True))
        elapsed = time.perf_counter() - self._begin
        recorded, n_steps_done = self._recorder, self._recorder.n_steps
        seconds = recorded.stopwatch.seconds()
        straggler = self._stragglers.gather(str(order))
        self.send(
            Progress(
                epoch=order.epoch,
                step=order.step,
                n_steps=n_steps,
                learning_rate=learning_rate,
                loss=loss_sum / n_images,
                error=n_wrong / (n_images * recorded.n_decisions) if self._config.print_train_error else None,
                images_per_second=n_images / elapsed,
                seconds_per_20=20 * elapsed / n_steps_done,
                seconds=seconds,
                bytes_per_step=recorded.n_bytes / n_steps_done,
                network_bytes_per_step=recorded.n_network_bytes / n_steps_done,
                straggler=straggler,
            )
        )
        # `tick` has not done this in short epochs, and with rules that synchronize rarely.
        self._warn_of_cost(seconds["compute"] / n_steps_done)
        self.begin()

    def end_epoch(self, epoch: int) -> None:
        """Send all trainers' times of an epoch. All trainers call it after the epoch's last step."""
        times = self._stragglers.end_epoch(epoch)
        if times:
            self.send(times)

    def _warn_of_cost(self, compute_seconds: float) -> None:
        """Warn of the network's cost, if the run uses one. compute_seconds: Compute time of a step."""
        recorded = self._recorder
        if recorded.n_network_bytes:
            self.warn(self._coordinator.cost(recorded.n_network_bytes / recorded.n_steps, compute_seconds))


def check_finite(loss: float, where: str) -> None:
    """Raise UserError if the loss is not finite."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at {where}: lower learning_rate, and check that images and labels match"
        )


def warnings_of(config: Config, dataset: Dataset, program: Program, rule: Rule) -> list[str]:
    """Return what a user should know before the first step."""
    warnings, image_shape, (rows, columns) = [], dataset.image_shape, program.crop_size
    if 2 * rows < image_shape[0] and 2 * columns < image_shape[1]:
        text = f"the network takes {rows} x {columns} pixels, less than a quarter of an image"
        remedy = f"make the dataset with --size {max(rows, columns) * 9 // 8}"
        warnings.append(f"{text}: {remedy}, or set a larger input_size")
    if crop_of(config) == "random" and (rows, columns) == tuple(image_shape[:2]):
        text = f"crop: random has no choice, because images are stored as {rows} x {columns} pixels"
        warnings.append(f"{text}: crop: padded moves them by a few pixels")
    promise = rule.promise(config, program.model)
    return [*warnings, promise] if promise else warnings
