"""Which orders a trainer gives: its part of every minibatch of a run, one after the other."""

from collections.abc import Iterator

from lockstep.comm.group import World
from lockstep.comm.messages import Order, Stage
from lockstep.config import Config
from lockstep.data.sampling import minibatches, share


class Orders:
    """n_train, n_val: images in the dataset. minibatch_size: images that all trainers take together."""

    def __init__(self, config: Config, world: World, n_train: int, n_val: int) -> None:
        self._config, self._world = config, world
        self._n_images: dict[Stage, int] = {"train": n_train, "val": n_val}
        self.minibatch_size = config.minibatch or config.batch_size * world.size

    def step_size(self, stage: Stage) -> int:
        """Images that all trainers take in one step: `accumulate` minibatches in training."""
        return self.minibatch_size * (self._config.accumulate if stage == "train" else 1)

    def n_steps(self, stage: Stage) -> int:
        """Steps in an epoch; the last may be a smaller one."""
        return -(-self._n_images[stage] // self.step_size(stage))

    def since(self, epoch: int, position: int) -> Iterator[Order]:
        """Every order from an epoch's `position` on: the epoch's training, then its validation, and so on."""
        for number in range(epoch, self._config.n_epochs + 1):
            yield from self.of("train", number, position)
            yield from self.of("val", number)
            position = 0

    def of(self, stage: Stage, epoch: int, position: int = 0) -> Iterator[Order]:
        """The orders of one stage of an epoch."""
        for start, stop in minibatches(self._n_images[stage], self.minibatch_size, position):
            first, last = share(start, stop, self._world.rank, self._world.size)
            yield Order(stage, epoch, start // self.step_size(stage) + 1, start, stop, first, last)
