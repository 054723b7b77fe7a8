"""What a host's first trainer tells the launcher while it trains."""

import math
import time
from typing import Any

from lockstep.comm.messages import Notice, Order, Progress, Tick
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.hosts.everyone import Everyone
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.sync import Rule

TICK_SECONDS = 0.25
_FEW = 4  # steps that tell what one costs; the first, which takes longer, is left out


class Teller:
    """The voice of a host's trainer 0; the others' are silent. control: the pipe to the launcher."""

    def __init__(self, control: Pipe, everyone: Everyone, config: Config, recorder: Recorder) -> None:
        self._control, self._everyone, self._config, self._recorder = control, everyone, config, recorder
        self._ticked_at = self._first_compute = 0.0
        self.begin()

    def begin(self) -> None:
        """The next line of progress is about what comes from now on."""
        self._wanted = False
        self._recorder.reset()
        self._begin = time.perf_counter()

    def tell(self, message: Any) -> None:
        if self._everyone.world.local_rank == 0:
            self._control.send(message)

    def notice(self, *texts: str) -> None:
        """Lines that the user should see; empty ones are left out."""
        for text in filter(None, texts):
            self.tell(Notice(text))

    def tick(self, order: Order, n_steps: int) -> None:
        now = time.perf_counter()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self.tell(Tick(order.stage, order.epoch, order.step, n_steps))
        n_done = self._recorder.n_steps
        if n_done in (1, _FEW) and self._everyone.has_cost:
            compute = self._recorder.stopwatch.seconds()["compute"]
            if n_done == 1:
                self._first_compute = compute
            else:
                self._tell_cost((compute - self._first_compute) / (n_done - 1))

    def is_due(self, order: Order, n_steps: int, n_samples: int, meeting: bool) -> bool:
        """Whether a line of progress comes after this step: every print_freq steps, once in a short epoch.

        meeting: whether trainers meet after it; else the line comes when they do.
        """
        ends_short_epoch = n_steps < self._config.print_freq and order.stop == n_samples
        self._wanted |= order.step % self._config.print_freq == 0 or ends_short_epoch
        return self._wanted and meeting

    def report(self, order: Order, n_steps: int, learning_rate: float, sums: list[list[float]]) -> None:
        """A line of progress. sums: every trainer's of its recorder, which are finite, since the last one."""
        loss_sum, n_wrong, n_images, _ = (sum(column) for column in zip(*sums, strict=True))
        loss = loss_sum / n_images
        elapsed = time.perf_counter() - self._begin
        recorded, n_steps_done = self._recorder, self._recorder.n_steps
        seconds = recorded.stopwatch.seconds()
        self.tell(
            Progress(
                order.epoch,
                order.step,
                n_steps,
                learning_rate,
                loss,
                n_wrong / n_images if self._config.print_train_error else None,
                n_images / elapsed,
                20 * elapsed / n_steps_done,
                seconds,
                recorded.n_bytes / n_steps_done,
                recorded.n_network_bytes / n_steps_done,
            )
        )
        self._tell_cost(seconds["compute"] / n_steps_done)  # of a short epoch, or a rule that meets seldom
        self.begin()

    def _tell_cost(self, compute_seconds: float) -> None:
        """Once, when something has gone over the network. compute_seconds: of a step."""
        recorded = self._recorder
        if recorded.n_network_bytes:
            self.notice(self._everyone.cost(recorded.n_network_bytes / recorded.n_steps, compute_seconds))


def check_finite(loss: float, where: str) -> None:
    """Raises UserError with what to do where the loss is not a number."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at {where}: lower learning_rate, and check that images and labels match"
        )


def notices_of(config: Config, picture: tuple[int, ...], program: Program, rule: Rule) -> list[str]:
    """What a user should know before the first step. picture: rows and columns of the dataset's images."""
    notices, size = [], program.crop_size
    if 2 * size < min(picture[:2]):
        text = f"the network takes {size} x {size} pixels, less than a quarter of a picture"
        notices.append(f"{text}: make the dataset with --size {size * 9 // 8}")
    promise = rule.promise(config, program.model)
    return [*notices, promise] if promise else notices
