"""The single trainer on a GPU, timed by events, and a step in plain PyTorch to compare it with."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import lone
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import Turn, stage_milliseconds
from benchmarks.lone import NEVER
from lockstep.config import Layer, resolve
from lockstep.loading.feed import Feed
from lockstep.network import low_precision

_STAGE_STEPS = 20


class LoneTrainer(lone.LoneTrainer):
    """On cuda:0."""

    def __init__(self, setting: Setting, data_folder: Path, **keys: Any) -> None:
        values = {
            "model": setting.model,
            "model_args": setting.model_args,
            "n_classes": setting.n_classes,
            "batch_size": setting.batch_size,
            "data_folder": str(data_folder),
            "devices": ["cuda:0"],
            "print_freq": NEVER,
            "timeout": 600,  # loaders wait for the others' turns
            **keys,
        }
        super().__init__(resolve([Layer("benchmark", values)])[0])
        self.memory, self.stream = self.trainer.backend.memory, self.trainer.backend.stream
        self.driver, self.device = self.memory.driver, self.trainer.program.device

    def turn(self, feed: Feed) -> Turn:
        return Turn(lambda: self.use(feed), self.step)

    def synchronize(self) -> None:
        """Wait for all streams of the device's context, including torch's."""
        self.driver.Context.synchronize()

    def phases(self, feed: Feed, n_steps: int) -> dict[str, float]:
        """Milliseconds of a step by the recorder's phases, on the device."""
        self.use(feed)
        for _ in range(2 * self.config.n_slots):
            self.step()
        self.synchronize()
        self.trainer.recorder.reset()
        for _ in range(n_steps):
            self.step()
        seconds = self.trainer.recorder.stopwatch.seconds()
        return {phase: value * 1e3 / n_steps for phase, value in seconds.items()}

    def stages(self) -> dict[str, float]:
        """Milliseconds of a step on resident data by stages, on the device."""
        program, turn = self.trainer.program, self.turn(self.resident)
        return stage_milliseconds(
            turn, program.model, program.optimizer, self.driver.Event, self.stream, _STAGE_STEPS
        )

    def mean_loss(self) -> float:
        """The mean loss of all steps so far: a number if the timed steps trained."""
        loss, _, n_images, _ = self.trainer.recorder.sums()
        return loss / n_images

    def use(self, feed: Feed) -> None:
        low_precision.configure(self.config)
        compute_in(self.stream, self.device)
        super().use(feed)


def compute_in(stream: Any, device: torch.device) -> None:
    """Makes torch compute in PyCUDA's stream, or in its own default stream (None). A CPU has no streams."""
    if device.type != "cuda":
        return
    if stream is None:
        torch.cuda.set_stream(torch.cuda.default_stream(device))
    else:
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream.handle, device))


class PlainTraining:
    """A training step as one writes it in PyTorch today: autocast to bfloat16, channels last, fused SGD, and
    cuDNN trying its algorithms. Nothing of Lockstep is in it but the network, where that is ours.

    images: (batch, 3, row, column), labels: int64 (batch,), resident on the device.
    """

    def __init__(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.device = images.device
        self.model = model.to(self.device).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.001, momentum=0.9, weight_decay=0.0005, fused=True
        )
        self._images = images.to(torch.bfloat16, memory_format=torch.channels_last, copy=True)
        self._labels = labels.clone()
        self.loss = torch.zeros((), device=self.device)

    def turn(self) -> Turn:
        return Turn(self._prepare, self._step)

    def stages(self, new_event: Any) -> dict[str, float]:
        """Return the stages as LoneTrainer.stages does."""
        return stage_milliseconds(self.turn(), self.model, self.optimizer, new_event, None, _STAGE_STEPS)

    def _prepare(self) -> None:
        torch.backends.cudnn.benchmark = True
        compute_in(None, self.device)

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            self.loss = F.cross_entropy(self.model(self._images), self._labels)
        self.loss.backward()
        self.optimizer.step()
