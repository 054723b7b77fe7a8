"""The rule `local`: trainers step alone, and everything is averaged now and then.

Local SGD (Stich 2019, arXiv 1805.09767); with `from_epoch`, after epochs that are exact, post-local SGD (Lin,
Stich, Patel, Jaggi 2020, arXiv 1808.07217). Weights, the optimizer's state, buffers and moving averages are
averaged together: momenta that stay apart make it worse (docs/rules.md). Over several hosts it is these that
step alone: the trainers of one host average weights and momenta after every step, as in `weights`.
"""

from typing import Any

from torch import nn

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.sync import Meeting
from lockstep.sync.weights import Weights


class Local(Weights):
    """every: trainers meet after steps whose number in the epoch is a multiple of it, and after the last.

    from_epoch: up to this epoch they meet after every step.
    """

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any]) -> None:
        super().__init__(transport, arena)
        self._every, self._from_epoch = args["every"], args["from_epoch"]
        self._within = transport.within()
        self._apart = False  # whether the steps since the last meeting were taken alone

    def is_due(self, order: Order, n_samples: int) -> bool:
        self._apart = order.epoch > self._from_epoch
        return not self._apart or order.step % self._every == 0 or order.stop == n_samples

    def update(self, optimizer: Any, meeting: Meeting | None) -> None:
        optimizer.step()
        if meeting:
            self.average(meeting)
        elif self._within is not self._transport:
            self._within.all_reduce((0, self._transport.n_elements), "mean")

    def average(self, meeting: Meeting) -> None:
        """Makes all replicas one again."""
        self._transport.all_reduce((0, self._transport.n_elements), "mean", meeting.barrier)

    def promise(self, config: Config, model: nn.Module) -> str:
        since = f" after epoch {self._from_epoch}" if self._from_epoch else ""
        who = "hosts" if config.hosts > 1 else "trainers"
        text = f"rule: {config.rule}: {who} step alone and meet every {self._every} steps{since}"
        return f"{text}: this is another training than one trainer's"
