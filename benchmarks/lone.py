"""Trainers without a launcher, to time their steps on batches from a loader or on a resident batch."""

import itertools
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
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
from lockstep.runs.plan import RunPlan
from train_funcs import Trainer

NEVER = 10**6  # steps between lines of progress, because printing waits for the device


class ResidentFeed(Feed):
    """A feed that repeats one batch, to measure a step without loading."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def next(self) -> Order:
        return self._batch.order

    def batch(self) -> Batch:
        return self._batch

    def release(self) -> None:
        """Keep the batch."""

    def close(self) -> None:
        """Do nothing."""


class UnlaunchedTrainer(Trainer):
    """A trainer without a launcher, which starts from scratch. Nobody asks it for checkpoints."""

    def __init__(
        self,
        config: Config,
        group: Group,
        loaders: Sequence[Pipe] = (),
        orders: Iterator[Order] | None = None,
    ) -> None:
        control, launcher = multiprocessing.Pipe()
        self._launcher = Pipe(launcher, "the trainer", DEADLINE)
        plan, pipe = RunPlan(config, Path(), None), Pipe(control, "the launcher", DEADLINE)
        super().__init__(plan, group, pipe, StatusBoard.create(), loaders, orders)

    def discard_messages(self) -> None:
        """Discard what the trainer has sent to its launcher, such as lines of progress."""
        while self._launcher.poll():
            self._launcher.receive(object, "a message")


class LoneTrainer:
    """The real trainer, with a loader process if `para_load` is set, and with endless orders.

    Args:
        group: The group of several trainers that start at the same time; by default a single trainer.

    `loaded` is the feed that the trainer opened; `resident` repeats one batch.
    """

    def __init__(self, config: Config, group: Group | None = None) -> None:
        self.config, group = config, group or Group.on_one_host(0, {})
        self._processes = Processes(DEADLINE)
        loaders = [self._start_loader()] if config.para_load else []
        orders = endless(len(open_dataset(config).train), config.batch_size, group.world)
        self.trainer = UnlaunchedTrainer(config, group, loaders, orders)
        self.trainer.begin_epoch()
        self.loaded = self.trainer.feed
        self.loaded.next()
        self.resident = ResidentFeed(self.loaded.batch())
        self.loaded.release()

    def step(self) -> None:
        self.trainer.train_step(sys.maxsize)  # longer than an epoch: none ends, with a line of progress

    def use(self, feed: Feed) -> None:
        """Take minibatches from `feed` from now on."""
        self.trainer.discard_messages()
        self.trainer.feed = feed

    def close(self) -> None:
        self.trainer.feed = self.loaded
        self.trainer.close()
        self._processes.end()

    def _start_loader(self) -> Pipe:
        ours, theirs = multiprocessing.Pipe()
        (world,) = World.on_one_host(1)
        self._processes.start("loader 0", "proc_load:run_loader", (theirs, world, self.config))
        return Pipe(ours, "loader 0", DEADLINE)


def endless(n_samples: int, size: int, world: World) -> Iterator[Order]:
    """Yield one trainer's orders for full minibatches of `size` images, epoch after epoch."""
    whole = size * world.size
    for epoch in itertools.count(1):
        for step, (start, stop) in enumerate(minibatches(n_samples // whole * whole, whole), 1):
            first = start + size * world.rank
            yield Order("train", epoch, step, start, stop, first, first + size)
