"""The self-check of trainers: another one computes a logical rank's gradient again (`recheck_every`).

A wrong gradient is invisible to the comparison of replicas, since all of them get the same wrong sum. Here
the digests of two trainers' gradients of one logical rank are compared before the sum. A third trainer
decides which of the two is wrong.
"""

import dataclasses
from collections import deque
from collections.abc import Callable

from lockstep.backends import Backend
from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.data.dataset import open_dataset
from lockstep.data.sampling import share
from lockstep.errors import DeviceFault, PeerLost, UndecidedFault
from lockstep.loading import Batch
from lockstep.loading.feed import Feed, NetworkInput, open_feed

Digest = Callable[[Batch, int], str]  # of the gradient of a logical rank, from its images and its number


class Recheck:
    """The check of one logical rank every `recheck_every` steps, of each in turn.

    Args:
        config: The run's.
        group: The trainers.
        backend: Of this trainer's device.
        network: The images that the network takes.
        digest_of: Computes a gradient again.
    """

    def __init__(
        self, config: Config, group: Group, backend: Backend, network: NetworkInput, digest_of: Digest
    ) -> None:
        self._config, self._group, self._backend = config, group, backend
        self._network, self._digest_of = network, digest_of
        self._orders: deque[Order] = deque()
        self._feed: Feed | None = None
        self._n_steps = self._first = 0

    def begin_step(self, order: Order) -> int | None:
        """Count a step, and return the logical rank that is checked in it, or None.

        The first one depends on the place at which the run has begun or resumed: otherwise a run that often
        resumes would rarely check the last logical ranks.
        """
        every, n_logical = self._config.recheck_every or 1, self._config.logical_ranks or 1
        if self._n_steps == 0:
            self._first = order.epoch + order.step - 2
        self._n_steps += 1
        number, rest = divmod(self._n_steps, every)
        return (self._first + number - 1) % n_logical if rest == 0 else None

    def compare(self, order: Order, bounds: tuple[int, ...], number: int, own: str) -> None:
        """Compare two trainers' gradients of a logical rank. All trainers call it after backward.

        Args:
            order: Of the step.
            bounds: Trainer r computes the logical ranks [bounds[r], bounds[r + 1]).
            number: The logical rank.
            own: The digest of its gradient in the trainer that owns it; any text in others.

        Raises:
            DeviceFault: This trainer's gradient is wrong.
            UndecidedFault: One of two trainers' gradients is wrong.
            PeerLost: Another trainer's gradient is wrong; the error names it.
        """
        world = self._group.world
        owner = sum(bound <= number for bound in bounds[1:])
        checker, judge = (owner + 1) % world.size, (owner + 2) % world.size
        digest = self._compute(order, number) if world.rank == checker else own
        digests = self._group.all_gather(f"{order}: recheck", digest)
        if digests[owner] == digests[checker]:
            return
        if judge == owner:
            raise UndecidedFault(
                f"trainers {owner} and {checker} compute different gradients of logical rank {number} at "
                f"{order}, and only a third trainer could decide which is wrong"
            )
        digest = self._compute(order, number) if world.rank == judge else ""
        decision = self._group.all_gather(f"{order}: recheck, third trainer", digest)[judge]
        wrong = checker if decision == digests[owner] else owner
        text = f"its gradient of logical rank {number} at {order} is not that of two other trainers"
        if decision not in (digests[owner], digests[checker]):
            text = f"trainers {owner}, {checker} and {judge} all differ in logical rank {number} at {order}"
        if wrong == world.rank:
            raise DeviceFault(f"{text}: its device computes wrong numbers")
        raise PeerLost(f"trainer {wrong}", f"finds that trainer {wrong} computes wrong gradients ({text})")

    def close(self) -> None:
        """Free the slot for images of others."""
        if self._feed:
            self._feed.close()

    def _compute(self, order: Order, number: int) -> str:
        """Read a logical rank's images and compute its gradient."""
        if self._feed is None:
            orders = iter(self._orders.popleft, None)
            config = dataclasses.replace(self._config, para_load=False)
            dataset = open_dataset(config)
            self._feed = open_feed(self._backend, config, dataset, self._network, orders, lambda text: None)
        first, last = share(order.start, order.stop, number, self._config.logical_ranks or 1)
        self._orders.append(dataclasses.replace(order, first=first, last=last))
        self._feed.next()
        digest = self._digest_of(self._feed.batch(), number)
        self._feed.release()
        return digest
