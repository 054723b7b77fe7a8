"""The rule `elastic`: EASGD (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651), with its force after the step.

Every replica is drawn to a centre, and the centre to all replicas. The paper's equations 5 and 6 take
gradient and elastic force at the same weights. Here a replica takes its step first, and the force is that at
the new weights; the two differ by the learning rate times alpha times the gradient. All replicas and the
centre move by the distances from before the exchange, which is stable if alpha (trainers + 1) < 2. It is a
rule of Theano-MPI, for comparison only: `local` learns better at the same bytes (docs/rules.md).
"""

from typing import Any

import torch

from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.sync import StepBarrier
from lockstep.sync.unsynchronized import UnsynchronizedRule


class ElasticRule(UnsynchronizedRule):
    """Replicas that are drawn to a centre, which is equal in all ranks.

    Only weights are drawn. Momenta, statistics and averages stay as they are; their centre is the mean.

    Args:
        transport: Over the arenas of all trainers.
        arena: This trainer's.
        args: `every`, and `alpha`, the share of its distance to the centre that a replica moves.
    """

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any]) -> None:
        super().__init__(transport, arena, {**args, "from_epoch": 0})
        self._alpha, self._centre = args["alpha"], arena.flat.clone()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self._centre.copy_(self._arena.flat)
        super().load(state)

    def average(self, step_barrier: StepBarrier) -> None:
        self._buffer.copy_(self._arena.flat)
        self._buffer_transport.all_reduce(self._whole, "mean", step_barrier)
        self._move()

    def answer(self) -> torch.Tensor:
        return self._centre

    def _move(self) -> None:
        n_weights = self._arena.n_weights
        weights, mean, centre = (each[:n_weights] for each in (self._arena.flat, self._buffer, self._centre))
        weights.lerp_(centre, self._alpha)
        centre.lerp_(mean, self._alpha * self._world.size)
        self._centre[n_weights:].copy_(self._buffer[n_weights:])
