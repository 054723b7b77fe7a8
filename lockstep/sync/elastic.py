"""The rule `elastic`: EASGD (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651, equations 5 and 6).

Every replica is drawn to a centre, and the centre to all of them. Theano-MPI's rule; kept for comparison:
`local` learns better at the same bytes (docs/rules.md).
"""

from typing import Any

import torch

from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
from lockstep.network.arena import Arena
from lockstep.sync import Meeting
from lockstep.sync.apart import Apart


class Elastic(Apart):
    """args: every, and alpha: the share of its distance that a replica moves. All keep the same centre.

    Weights are drawn; momenta, statistics and averages stay each trainer's, and their centre is the mean.
    """

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any], memory: Memory) -> None:
        super().__init__(transport, arena, {**args, "from_epoch": 0}, memory)
        self._alpha, self._centre = args["alpha"], arena.flat.clone()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self._centre.copy_(self._arena.flat)
        super().load(state)

    def average(self, meeting: Meeting) -> None:
        self._place.copy_(self._arena.flat)
        self._among.all_reduce(self._whole, "mean", meeting.barrier)
        self._move()

    def answer(self) -> torch.Tensor:
        return self._centre

    def _move(self) -> None:
        n_weights = self._arena.n_weights
        weights, mean, centre = (each[:n_weights] for each in (self._arena.flat, self._place, self._centre))
        weights.lerp_(centre, self._alpha)
        centre.lerp_(mean, self._alpha * self._world.size)
        self._centre[n_weights:].copy_(self._place[n_weights:])
