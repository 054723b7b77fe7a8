"""Where a trainer's time goes, and what it learned since the last line of progress."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("load-wait", "compute", "meet", "exchange")


class Recorder:
    """Seconds by phase (monotonic clock), and sums of loss and errors that stay on the device until read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.n_steps = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase's."""
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def add(self, loss_sum: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch: its summed cross-entropy, and how many of its top-1 answers were wrong."""
        n_wrong = (logits.detach().argmax(1) != labels).sum()
        n_images = torch.tensor(float(len(labels)), dtype=torch.float64, device=self._device)
        self._sums += torch.stack([loss_sum.detach().double(), n_wrong.double(), n_images])

    def sums(self) -> list[float]:
        """[loss, wrong answers, images] since the last reset; waits for the device."""
        values: list[float] = self._sums.tolist()
        return values
