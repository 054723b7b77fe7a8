"""The orders of a trainer: its share of every minibatch of a run, one after the other."""

from collections.abc import Iterator
from itertools import islice

from lockstep.comm.group import World
from lockstep.comm.messages import Order, Stage
from lockstep.config import Config
from lockstep.config.shares import Bounds, bounds_of, share_of
from lockstep.data.sampling import minibatches, share

_Place = tuple[int, bool, int]  # of an order in a run: epoch, whether in validation, first position


class Orders:
    """A trainer's orders, of a dataset with n_train and n_val images.

    Attributes:
        config: The run's configuration.
        minibatch_size: Images that all trainers take together in one minibatch.
    """

    def __init__(self, config: Config, world: World, n_train: int, n_val: int) -> None:
        self.config, self._world = config, world
        self._n_images: dict[Stage, int] = {"train": n_train, "val": n_val}
        self.minibatch_size = config.global_batch_size or config.batch_size * world.size
        self._bounds: Bounds = bounds_of(config) if config.logical_ranks else ()
        self._next_bounds: tuple[_Place, Bounds] | None = None

    def step_size(self, stage: Stage) -> int:
        """Return the images that all trainers take in one step: `accumulate` minibatches in training."""
        return self.minibatch_size * (self.config.accumulate if stage == "train" else 1)

    def n_images(self, stage: Stage) -> int:
        """Return the images of an epoch."""
        return self._n_images[stage]

    def n_steps(self, stage: Stage) -> int:
        """Return the steps in an epoch; the last may be a smaller one."""
        return -(-self._n_images[stage] // self.step_size(stage))

    def since(self, epoch: int, position: int) -> Iterator[Order]:
        """Yield all orders from an epoch's `position` on: its training and validation, then later epochs."""
        for number in range(epoch, self.config.n_epochs + 1):
            yield from self.of("train", number, position)
            if self.validates(number):
                yield from self.of("val", number)
            position = 0

    def validates(self, epoch: int) -> bool:
        """Return whether an epoch ends with a validation (`val_freq`)."""
        return epoch % self.config.val_freq == 0 or epoch == self.config.n_epochs

    def of(self, stage: Stage, epoch: int, position: int = 0) -> Iterator[Order]:
        """Yield the orders of one stage of an epoch."""
        for start, stop in minibatches(self._n_images[stage], self.minibatch_size, position):
            if self._next_bounds and (epoch, stage == "val", start) >= self._next_bounds[0]:
                self._bounds, self._next_bounds = self._next_bounds[1], None
            first, last = self._share(start, stop)
            step = start // self.step_size(stage) + 1
            of_step = self._step_of(start, position) if stage == "train" else None
            yield Order(stage, epoch, step, start, stop, first, last, bounds=self._bounds, of_step=of_step)

    def _step_of(self, start: int, position: int) -> tuple[int, int] | None:
        """Return the positions of the step that a minibatch belongs to; None if it is the only one.

        Args:
            start: The minibatch's first position.
            position: Where the first step begins.
        """
        if self.config.accumulate == 1:
            return None
        size = self.step_size("train")
        first = position + (start - position) // size * size
        return first, min(first + size, self._n_images["train"])

    def change_bounds(self, bounds: Bounds, order: Order) -> Order | None:
        """Give the trainers other logical ranks, from the first order that no loader has yet.

        All trainers call it after the same order.

        Args:
            bounds: Trainer r computes the logical ranks [bounds[r], bounds[r + 1]).
            order: The last one that was used.

        Returns:
            The first order with the new bounds; None if the run ends before.
        """
        later = Orders(self.config, self._world, self._n_images["train"], self._n_images["val"])
        following = later.since(order.epoch, order.stop)  # a loader has n_slots orders at most
        first = next(islice(following, self.config.n_slots, None), None)
        if first is not None:
            self._next_bounds = (first.epoch, first.stage == "val", first.start), bounds
        return first

    def _share(self, start: int, stop: int) -> tuple[int, int]:
        """Return this trainer's positions of a minibatch."""
        rank, n_logical = self._world.rank, self.config.logical_ranks
        if n_logical is None:
            return share(start, stop, rank, self._world.size)
        return share_of(start, stop, (self._bounds[rank], self._bounds[rank + 1]), n_logical)
