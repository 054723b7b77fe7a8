"""A trainer's time by phase, and its losses and errors since the last line of progress."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.messages import Order
from lockstep.runs.stragglers import PHASES

_MOST_PENDING = 256  # pairs of events whose times have not been read
_MOST_STEPS = 1024  # whose times are kept apart; all trainers forget the same older ones


class Stopwatch(ABC):
    """Seconds by phase. Time counts for the phase that was entered last, until `leave`."""

    def __init__(self) -> None:
        self._before = dict.fromkeys(PHASES, 0.0)  # seconds before the last reset
        self._seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Set all seconds to 0 and leave the current phase."""
        for phase, seconds in self._seconds.items():
            self._before[phase] += seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._step = dict.fromkeys(PHASES, 0.0)
        self._steps: deque[dict[str, float]] = deque(maxlen=_MOST_STEPS)
        self._phase: str | None = None
        self._begin: Any = None

    def enter(self, phase: str) -> None:
        """Count time for `phase`, one of PHASES, from now on."""
        now = self.now()
        if self._phase is not None:
            self._lap(self._phase, self._begin, now)
        self._phase, self._begin = phase, now

    def leave(self) -> None:
        """Stop counting time."""
        if self._phase is not None:
            self._lap(self._phase, self._begin, self.now())
        self._phase = None

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all phases that have ended since the last reset. Waits for the device."""
        return dict(self._seconds)

    def total(self, phase: str) -> float:
        """Return the seconds of a phase since the stopwatch was made. Waits for the device."""
        return self._before[phase] + self.seconds()[phase]

    def end_step(self) -> None:
        """End a step: later time counts for the next one."""
        self._steps.append(self._step)
        self._step = dict.fromkeys(PHASES, 0.0)

    def take_steps(self) -> list[dict[str, float]]:
        """Return the seconds by phase of each step since the last call or reset. Waits for the device."""
        self.seconds()
        steps = list(self._steps)
        self._steps.clear()
        return steps

    def _add(self, step: dict[str, float], phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds
        step[phase] += seconds

    @abstractmethod
    def now(self) -> Any:
        """Return a point in the device's work, at which all work that was asked for before is done."""

    @abstractmethod
    def is_past(self, point: Any) -> bool:
        """Return whether the device has reached a point. Never waits."""

    @abstractmethod
    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two points. Waits for the device."""

    @abstractmethod
    def _lap(self, name: str, begin: Any, end: Any) -> None:
        """Add the time between two points to a phase of the present step."""


class HostStopwatch(Stopwatch):
    """A stopwatch that reads the host's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def is_past(self, point: float) -> bool:
        return True

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin

    def _lap(self, name: str, begin: float, end: float) -> None:
        self._add(self._step, name, end - begin)


class StreamStopwatch(Stopwatch):
    """A stopwatch that records events in a device's stream, because the host runs ahead of its device.

    Args:
        new_event: Returns an event with `record(stream)`, `query()`, `synchronize()` and `time_since(event)`
            in ms.
        stream: The stream in which torch computes.
    """

    def __init__(self, new_event: Callable[[], Any], stream: Any) -> None:
        self._new_event, self._stream = new_event, stream
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._pending: deque[tuple[dict[str, float], str, Any, Any]] = deque()

    def seconds(self) -> dict[str, float]:
        while self._pending:
            self._read()
        return super().seconds()

    def now(self) -> Any:
        event = self._new_event()
        event.record(self._stream)
        return event

    def is_past(self, point: Any) -> bool:
        return bool(point.query())

    def seconds_between(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(end.time_since(begin)) / 1e3

    def _lap(self, name: str, begin: Any, end: Any) -> None:
        self._pending.append((self._step, name, begin, end))
        while len(self._pending) > _MOST_PENDING and self.is_past(self._pending[0][3]):
            self._read()

    def _read(self) -> None:
        step, name, begin, end = self._pending.popleft()
        self._add(step, name, self.seconds_between(begin, end))


class Recorder:
    """Seconds by phase, and sums of losses and errors that stay on the device until they are read.

    Attributes:
        n_steps: Steps since the last reset.
        n_bytes: Bytes exchanged with trainers of this host in them.
        n_network_bytes: Bytes sent to other hosts in them.
        orders: Their minibatches, in order.
        n_decisions: Answers to an image that can be wrong: 1, or with `task: multilabel` one for each class.
    """

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        self.stopwatch, self.n_decisions = stopwatch, 1
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.stopwatch.reset()
        self.n_steps = self.n_bytes = self.n_network_bytes = 0
        self.orders: list[Order] = []
        self._sums.zero_()  # in place, because a captured step adds to this tensor

    def count_step(self, n_bytes: int, n_network_bytes: int = 0, synchronized: bool = True) -> None:
        """Stop the clock, and count a step of the optimizer and the bytes that it exchanged.

        Args:
            n_bytes: Exchanged with trainers of this host.
            n_network_bytes: Sent to other hosts.
            synchronized: Whether the step ended at a barrier. The times of a step without one count for the
                next step with one, at which the others wait for this trainer.
        """
        self.stopwatch.leave()
        if synchronized:
            self.stopwatch.end_step()
        self.n_network_bytes += n_network_bytes
        self.n_steps += 1
        self.n_bytes += n_bytes

    def add(self, loss_sum: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch's summed cross-entropy and the number of its wrong answers.

        Args:
            labels: int64 (n,), whose answers are the most probable classes; or 0 and 1, (n, class), whose
                answers are the classes with a probability of at least a half.
        """
        if labels.dim() == 1:
            n_wrong = (logits.detach().argmax(1) != labels).sum()
        else:
            self.n_decisions = labels.shape[1]
            n_wrong = ((logits.detach() >= 0) != (labels >= 0.5)).sum()
        n_images = torch.full_like(n_wrong, len(labels))
        self._sums[:3] += torch.stack([rounded(loss_sum.detach()), n_wrong.double(), n_images.double()])

    def end_batch(self, order: Order) -> None:
        """Record a minibatch; count it if all losses so far are finite. Never waits for the device."""
        self.orders.append(order)
        self._sums[3] += self._sums[0].isfinite()

    def sums(self) -> list[float]:
        """Return [loss, wrong answers, images, minibatches before a non-finite loss] since the last reset.

        Waits for the device.
        """
        values: list[float] = self._sums.tolist()
        return values


def rounded(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss in float64, rounded to 2^-32 nats.

    Sums of such numbers, up to two million nats, are exact in any order.
    """
    return loss.double().mul(2.0**32).round().div(2.0**32)
