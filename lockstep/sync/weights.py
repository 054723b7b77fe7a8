"""The rule `weights`: each trainer takes its own step, then weights, momenta and buffers are averaged.

For SGD with momentum, averaging weights and momenta after every step is averaging gradients before it, since
the update is linear in both (docs/how-it-works.md has the two lines of algebra). Theano_alexnet's rule: Ding,
Wang, Mao, Taylor 2014, arXiv 1412.2302, section 2.2.
"""

from torch import nn

from lockstep.config import Config
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.network.optimizer import inexact_parts
from lockstep.network.updater import Updater
from lockstep.sync import Meeting, Rule


class Weights(Rule):
    """transport: over the arenas of all trainers."""

    def __init__(self, transport: Transport, arena: Arena) -> None:
        self._transport, self._arena = transport, arena

    def update(self, optimizer: Updater, meeting: Meeting | None) -> None:
        assert meeting
        optimizer.step()
        self._transport.all_reduce((0, self._transport.n_elements), "mean", meeting.barrier)

    def promise(self, config: Config, model: nn.Module) -> str:
        return inexact("; ".join(inexact_parts(config, model)), config)

    def bytes_per_meeting(self) -> int:
        return all_reduce_bytes(self._arena.flat.nbytes, self._transport.group.world.size)


def inexact(parts: str, config: Config) -> str:
    """The line for a rule that is exact but for some parts."""
    n_trainers = config.n_trainers
    text = f"{n_trainers} trainers are not exactly one with {n_trainers} times the batch"
    return f"{text}: {parts}" if parts and n_trainers > 1 else ""


def all_reduce_bytes(n_bytes: int, n_ranks: int) -> int:
    """A rank reads its shard of every other block, and writes it there."""
    return 2 * n_bytes * (n_ranks - 1) // n_ranks
