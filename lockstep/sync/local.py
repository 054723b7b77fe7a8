"""The rule `local`: trainers take their own steps, and average everything after every few of them.

Local SGD (Stich 2019, arXiv 1805.09767). With `from_epoch` the first epochs are exact: post-local SGD (Lin,
Stich, Patel, Jaggi 2020, arXiv 1808.07217). Weights, the optimizer's state, buffers and moving averages are
averaged; momenta that are not averaged make it worse (docs/rules.md). Over several hosts, hosts take the
place of trainers: the trainers of one host average after every step, as in `weights`.
"""

from typing import Any

from torch import nn

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.sync import StepBarrier
from lockstep.sync.weights import WeightsRule


class LocalRule(WeightsRule):
    """Local SGD.

    Args:
        transport: Over the arenas of all trainers.
        arena: This trainer's.
        args: `every`: trainers synchronize after steps whose number in the epoch is a multiple of it, and
            after the last one. `from_epoch`: up to this epoch they do so after every step.
    """

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any]) -> None:
        super().__init__(transport, arena)
        self._every, self._from_epoch = args["every"], args["from_epoch"]
        self._within = transport.within()

    def is_due(self, order: Order, n_samples: int) -> bool:
        return self.is_exact(order) or order.step % self._every == 0 or order.stop == n_samples

    def is_exact(self, order: Order) -> bool:
        """Return whether trainers synchronize after every step of this epoch."""
        return order.epoch <= int(self._from_epoch)

    def update(self, optimizer: Any, step_barrier: StepBarrier | None) -> None:
        optimizer.step()
        if step_barrier:
            self.average(step_barrier)
        elif self._within is not self._transport:
            self._average(self._within)

    def average(self, step_barrier: StepBarrier) -> None:
        """Make all replicas equal."""
        self._average(self._transport, step_barrier)

    def promise(self, config: Config, model: nn.Module) -> str:
        since = f" after epoch {self._from_epoch}" if self._from_epoch else ""
        actors = "hosts" if config.n_hosts > 1 else "trainers"
        when = f"every {self._every} steps" if self._every > 1 else "after each"
        how = f"{actors} take their own steps and synchronize {when}{since}"
        return f"rule: {config.rule}: {how}: this is another training than one trainer's"
