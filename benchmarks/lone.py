"""A trainer without a launcher, whose steps are timed: on what a loader brings, or on what is there."""

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from lockstep.comm.group import Group, World
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.dataset import open_dataset
from lockstep.data.sampling import minibatches
from lockstep.launch.processes import Processes
from lockstep.launch.ranks import DEADLINE
from lockstep.launch.status import StatusBoard
from lockstep.loading import Batch
from lockstep.loading.feed import Feed
from lockstep.runs.plan import Plan
from train_funcs import Trainer

NEVER = 10**6  # steps between lines of progress: printing waits for the device


class ResidentFeed(Feed):
    """The same batch again and again: what a step costs when loading costs nothing."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def next(self) -> Order:
        return self._batch.order

    def batch(self) -> Batch:
        return self._batch

    def release(self) -> None:
        """It stays."""

    def close(self) -> None:
        """Nothing to end."""


class LoneTrainer:
    """The real trainer, with a loader process where `para_load` is set. Its orders never end.

    group: of several, who all make one at once; without, it is alone. loaded: the feed that it opened.
    resident: a feed of one batch, views of whatever lies in that place.
    """

    def __init__(self, config: Config, group: Group | None = None) -> None:
        self.config, group = config, group or Group.on_one_host(0, {})
        self._processes = Processes(DEADLINE)
        loaders = [self._start_loader()] if config.para_load else []
        control, launcher = multiprocessing.Pipe()
        self._launcher = Pipe(launcher, "the trainer", DEADLINE)
        self.trainer = Trainer(
            Plan(config, Path(), None),
            group,
            loaders,
            Pipe(control, "the launcher", DEADLINE),
            StatusBoard.create(),
            endless(len(open_dataset(config).train), config.batch_size, group.world),
        )
        self.trainer.begin_epoch()
        self.loaded = self.trainer.feed
        self.loaded.next()
        self.resident = ResidentFeed(self.loaded.batch())
        self.loaded.release()

    def step(self) -> None:
        self.trainer.train_step(NEVER)

    def use(self, feed: Feed) -> None:
        """Takes its minibatches from `feed` from now on."""
        while self._launcher.poll():  # ticks that nobody wants to see
            self._launcher.receive(object, "a tick")
        self.trainer.feed = feed

    def close(self) -> None:
        self.trainer.feed = self.loaded
        self.trainer.close()
        self._processes.end()

    def _start_loader(self) -> Pipe:
        ours, theirs = multiprocessing.Pipe()
        (world,) = World.on_one_host(1)
        self._processes.start("loader 0", "proc_load:run_loader", (theirs, world, self.config))
        theirs.close()
        return Pipe(ours, "loader 0", DEADLINE)


def endless(n_samples: int, size: int, world: World) -> Iterator[Order]:
    """One trainer's training orders of full minibatches, `size` pictures each, epoch after epoch."""
    whole = size * world.size
    for epoch in itertools.count(1):
        for step, (start, stop) in enumerate(minibatches(n_samples // whole * whole, whole), 1):
            first = start + size * world.rank
            yield Order("train", epoch, step, start, stop, first, first + size)
