"""A trainer without a launcher, whose steps are timed, and a step in plain PyTorch to hold it against."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import Turn, stage_milliseconds
from benchmarks.stepping import ResidentFeed, endless, load
from lockstep import precision
from lockstep.config import Config, Layer, resolve
from lockstep.feed import Feed
from lockstep.group import Group
from lockstep.messages import Order
from lockstep.pipes import Pipe
from lockstep.plan import Plan
from lockstep.ranks import DEADLINE
from lockstep.status import StatusBoard
from train_funcs import Trainer

NEVER = 10**6  # steps between lines of progress: printing waits for the device
_STAGE_STEPS = 20


class LoneTrainer(Trainer):
    """The real trainer on cuda:0, with a loader process where `para_load` is set. Its orders never end."""

    def __init__(self, setting: Setting, data_folder: Path, **keys: Any) -> None:
        values = {
            "model": setting.model,
            "model_args": setting.model_args,
            "n_classes": setting.n_classes,
            "batch_size": setting.batch_size,
            "data_folder": str(data_folder),
            "devices": ["cuda:0"],
            "print_freq": NEVER,
            "wait_deadline": 600,  # loaders wait for the others' turns
            **keys,
        }
        config = resolve([Layer("benchmark", values)])[0]
        control, self._launcher = multiprocessing.Pipe()
        loader = _start_loader(config) if config.para_load else None
        launcher = Pipe(control, "the launcher", DEADLINE)
        super().__init__(
            Plan(config, Path("."), None), Group.on_one_host(0, {}), loader, launcher, StatusBoard.create()
        )
        self.begin_epoch()
        self.driver, self.stream = self.backend.memory.driver, self.backend.stream
        self.loaded = self.feed
        self.feed.next()
        self.resident = ResidentFeed(self.feed.batch())  # views: of whatever lies in that place
        self.feed.release()

    def orders(self) -> Iterator[Order]:
        return endless(len(self.dataset.train), self.config.batch_size)

    def close(self) -> None:
        self.feed = self.loaded
        super().close()

    def turn(self, feed: Feed) -> Turn:
        return Turn(lambda: self._prepare(feed), lambda: self.train_step(NEVER))

    def synchronize(self) -> None:
        """Waits for all streams of the device's context, torch's too."""
        self.driver.Context.synchronize()

    def phases(self, feed: Feed, n_steps: int) -> dict[str, float]:
        """Milliseconds of a step by the recorder's phases, on the device."""
        self._prepare(feed)
        for _ in range(2 * self.config.n_slots):
            self.train_step(NEVER)
        self.synchronize()
        self.recorder.reset()
        for _ in range(n_steps):
            self.train_step(NEVER)
        seconds = self.recorder.stopwatch.seconds()
        return {phase: value * 1e3 / n_steps for phase, value in seconds.items()}

    def stages(self) -> dict[str, float]:
        """Milliseconds of a step on resident data by stages, on the device."""
        optimizer = self.program.optimizer.inner
        turn = self.turn(self.resident)
        return stage_milliseconds(
            turn, self.program.model, optimizer, self.driver.Event, self.stream, _STAGE_STEPS
        )

    def mean_loss(self) -> float:
        """Of all steps so far: a number if what has been timed was training."""
        loss, _, n_images = self.recorder.sums()
        return loss / n_images

    def _prepare(self, feed: Feed) -> None:
        while self._launcher.poll():  # ticks that nobody wants to see
            self._launcher.recv()
        precision.configure(self.config)
        compute_in(self.stream, self.program.device)
        self.feed = feed


def _start_loader(config: Config) -> Pipe:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=load, args=(theirs, config), daemon=True).start()
    theirs.close()
    return Pipe(ours, "loader 0", DEADLINE)


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
        """As LoneTrainer.stages."""
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
