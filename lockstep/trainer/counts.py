"""The integer buffers of a network, such as counts of steps: equal in all trainers after every step."""

import torch

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.network.arena import Arena
from lockstep.trainer.coordinator import Coordinator


class Counts:
    """A trainer's integer buffers, such as counts of steps, which trainers do not average.

    A trainer without images in a minibatch does not call the network. So after a step with a minibatch that
    has fewer images than parts, the last one of an epoch, all trainers take what trainer 0 has.

    Args:
        config: The run's configuration.
        arena: Of this trainer.
        coordinator: The trainers of all hosts.
    """

    def __init__(self, config: Config, arena: Arena, coordinator: Coordinator) -> None:
        self._counts, self._coordinator = arena.counts if coordinator.world.size > 1 else [], coordinator
        self._n_parts = config.logical_ranks or coordinator.world.size

    def after_step(self, order: Order) -> None:
        """Copy trainer 0's counts if a trainer may have had no images. order: The step's last minibatch."""
        if not self._counts or order.stop - order.start >= self._n_parts:
            return
        numbers = torch.cat([count.cpu().reshape(-1).view(torch.uint8) for count in self._counts])
        theirs = self._coordinator.of_first(f"copying counts after {order}", numbers)
        sizes = [count.nbytes for count in self._counts]
        for count, part in zip(self._counts, torch.split(theirs, sizes), strict=True):
            # `clone`: the part may begin where a number of this dtype must not.
            count.copy_(part.clone().view(count.dtype).view(count.shape))
