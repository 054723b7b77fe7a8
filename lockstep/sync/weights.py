"""The rule `weights`: each trainer takes its own step, then all average weights, momenta and buffers.

For SGD with momentum, averaging weights and momenta after every step equals averaging gradients before it,
since the update is linear in both (docs/how-it-works.md has the two lines of algebra). It is theano_alexnet's
rule: Ding, Wang, Mao, Taylor 2014, arXiv 1412.2302, section 2.2.
"""

from torch import nn

from lockstep.config import Config
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.network.optimizer import Updater, inexact_parts
from lockstep.sync import Rule, StepBarrier


class WeightsRule(Rule):
    """The mean of all arenas after every step.

    Args:
        transport: Over the arenas of all trainers.
        arena: This trainer's.
    """

    def __init__(self, transport: Transport, arena: Arena) -> None:
        self._transport, self._arena = transport, arena

    def update(self, optimizer: Updater, step_barrier: StepBarrier | None) -> None:
        assert step_barrier
        optimizer.step()
        self._average(self._transport, step_barrier)

    def _average(self, transport: Transport, step_barrier: StepBarrier | None = None) -> None:
        for span in self._arena.spans_to_average():
            transport.all_reduce(span, "mean", step_barrier)

    def promise(self, config: Config, model: nn.Module) -> str:
        return inexact("; ".join(inexact_parts(config, model)), config)

    def bytes_per_sync(self) -> int:
        n_elements = sum(last - first for first, last in self._arena.spans_to_average())
        return all_reduce_bytes(n_elements * self._arena.flat.itemsize, self._transport.group.world.size)


def inexact(parts: str, config: Config) -> str:
    """Return the promise of a rule that is exact but for these parts; empty parts: an empty line."""
    n_trainers = config.n_trainers
    text = f"{n_trainers} trainers are not exactly one with {n_trainers} times the batch"
    return f"{text}: {parts}" if parts and n_trainers > 1 else ""


def all_reduce_bytes(n_bytes: int, n_ranks: int) -> int:
    """Return the bytes of an all-reduce per rank, which reads and writes its shard of all other blocks."""
    return 2 * n_bytes * (n_ranks - 1) // n_ranks
