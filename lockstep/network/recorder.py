"""Where a trainer's time goes, and what it learned since the last line of progress."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.messages import Order

PHASES = ("load-wait", "compute", "meet", "exchange")
_MOST_PENDING = 256  # pairs of events that wait to be read


class Stopwatch(ABC):
    """Seconds by phase. Time counts for the phase that was entered last, until `leave`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """All seconds become 0, and no phase is on."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self._begin: Any = None

    def enter(self, phase: str) -> None:
        """From now on time counts for `phase`, one of PHASES."""
        now = self._now()
        if self._phase is not None:
            self._lap(self._phase, self._begin, now)
        self._phase, self._begin = phase, now

    def leave(self) -> None:
        """From now on time does not count."""
        if self._phase is not None:
            self._lap(self._phase, self._begin, self._now())
        self._phase = None

    def seconds(self) -> dict[str, float]:
        """Of the phases that have ended since the last reset; waits until it is known."""
        return dict(self._seconds)

    @abstractmethod
    def _now(self) -> Any:
        """A point in time."""

    @abstractmethod
    def _lap(self, name: str, begin: Any, end: Any) -> None:
        """Adds the time between two points."""


class HostStopwatch(Stopwatch):
    """By the processor's monotonic clock."""

    def _now(self) -> float:
        return time.perf_counter()

    def _lap(self, name: str, begin: float, end: float) -> None:
        self._seconds[name] += end - begin


class StreamStopwatch(Stopwatch):
    """By events in a device's stream: the process runs ahead of its device, so its own clock tells little.

    new_event: makes an event with `record(stream)`, `query()`, `synchronize()` and `time_since(event)` in ms.
    """

    def __init__(self, new_event: Callable[[], Any], stream: Any) -> None:
        self._new_event, self._stream = new_event, stream
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def seconds(self) -> dict[str, float]:
        while self._pending:
            self._read()
        return super().seconds()

    def _now(self) -> Any:
        event = self._new_event()
        event.record(self._stream)
        return event

    def _lap(self, name: str, begin: Any, end: Any) -> None:
        self._pending.append((name, begin, end))
        while len(self._pending) > _MOST_PENDING and self._pending[0][2].query():
            self._read()

    def _read(self) -> None:
        name, begin, end = self._pending.popleft()
        end.synchronize()
        self._seconds[name] += end.time_since(begin) / 1e3


class Recorder:
    """Seconds by phase, and sums of loss and errors that stay on the device until they are read.

    n_steps, n_bytes, n_network_bytes: steps since the last reset, and what went between trainers of this host
    in them, and from here to other hosts. orders: their minibatches, in order.
    """

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        self.stopwatch.reset()
        self.n_steps = self.n_bytes = self.n_network_bytes = 0
        self.orders: list[Order] = []
        self._sums.zero_()  # in place: a captured step adds to this very tensor

    def count_step(self, n_bytes: int, n_network_bytes: int = 0) -> None:
        """Counts a step of the optimizer, in which n_bytes went into or out of this trainer's memory."""
        self.n_network_bytes += n_network_bytes
        self.n_steps += 1
        self.n_bytes += n_bytes

    def add(self, loss_sum: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch: its summed cross-entropy, and how many of its top-1 answers were wrong."""
        n_wrong = (logits.detach().argmax(1) != labels).sum()
        n_images = torch.full_like(n_wrong, len(labels))
        self._sums[:3] += torch.stack([rounded(loss_sum.detach()), n_wrong.double(), n_images.double()])

    def end_batch(self, order: Order) -> None:
        """Remembers a minibatch, and counts it if all losses up to it are finite: nobody waits to see."""
        self.orders.append(order)
        self._sums[3] += self._sums[0].isfinite()

    def sums(self) -> list[float]:
        """[loss, wrong answers, images, minibatches before a loss that is not finite] since the last reset;
        waits for the device."""
        values: list[float] = self._sums.tolist()
        return values


def rounded(loss: torch.Tensor) -> torch.Tensor:
    """float64, to 2^-32 nats: sums of such numbers, up to two million nats, are exact in any order."""
    return loss.double().mul(2.0**32).round().div(2.0**32)
