"""The rule `gossip`: at a meeting every trainer averages with one other, which is drawn anew each time.

GoSGD (Blot, Picard, Cord, Thome 2016, arXiv 1611.01906) with pairs in place of messages on the way. Theano-
MPI's rule; kept for comparison: `gradients` moves as many bytes and is exact (docs/rules.md).
"""

from typing import Any

import numpy as np

from lockstep.comm.messages import Order
from lockstep.data.randomness import Purpose, seed_of
from lockstep.exchange import ALIGNMENT
from lockstep.exchange.transport import Collective, Transport
from lockstep.memory import Memory
from lockstep.network.arena import Arena
from lockstep.sync import Meeting
from lockstep.sync.apart import Apart


class Gossip(Apart):
    """args: every. seed: of the pairs, which are a function of it, the epoch and the step.

    One of a pair offers its replica in the first half of its block, the other in the second, so that each
    fetches into the half that nobody reads.
    """

    n_copies = 2

    def __init__(
        self, transport: Transport, arena: Arena, args: dict[str, Any], memory: Memory, seed: int
    ) -> None:
        super().__init__(transport, arena, {**args, "from_epoch": 0}, memory)
        assert len(arena.flat) % ALIGNMENT == 0
        self._seed = seed

    def is_due(self, order: Order, n_samples: int) -> bool:
        self._order = order
        return super().is_due(order, n_samples)

    def average(self, meeting: Meeting) -> None:
        seed = seed_of(Purpose.PAIRS, self._seed, self._order.epoch, self._order.step)
        ranks = np.random.default_rng(seed).permutation(self._world.size).tolist()
        place, size = ranks.index(self._world.rank), len(self._arena.flat)
        halves = (0, size), (size, 2 * size)
        mine, theirs = halves[place % 2], halves[1 - place % 2]
        self._place[slice(*mine)].copy_(self._arena.flat)
        self._among.offer(Collective("broadcast", mine, source=self._world.rank))
        meeting.barrier("gossip: all have offered")
        self._among.accept()
        if place ^ 1 < len(ranks):  # of an odd number one stays alone
            self._among.work(Collective("broadcast", theirs, source=ranks[place ^ 1]))
            self._blend(theirs)
        meeting.barrier("gossip: all have worked")

    def _blend(self, half: tuple[int, int]) -> None:
        self._arena.flat.lerp_(self._place[slice(*half)], 0.5)

    def bytes_per_meeting(self) -> int:
        return self._arena.flat.nbytes
