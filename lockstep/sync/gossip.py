"""The rule `gossip`: every trainer averages with one other, drawn at random each time.

GoSGD (Blot, Picard, Cord, Thome 2016, arXiv 1611.01906) with pairs instead of asynchronous messages. It is a
rule of Theano-MPI, for comparison only: `gradients` moves as many bytes and is exact (docs/rules.md).
"""

from typing import Any

import numpy as np

from lockstep.data.randomness import Purpose, seed_of
from lockstep.exchange import ALIGNMENT
from lockstep.exchange.transport import Collective, Transport
from lockstep.network.arena import Arena
from lockstep.sync import StepBarrier
from lockstep.sync.unsynchronized import UnsynchronizedRule


class GossipRule(UnsynchronizedRule):
    """Replicas that average in pairs, which are a function of the seed, the epoch and the step.

    One of a pair puts its replica in the first half of its second block, the other in the second half. So
    each fetches into the half that no rank reads.

    Args:
        transport: Over the arenas of all trainers.
        arena: This trainer's.
        args: `every`.
        seed: Of the pairs.
    """

    n_copies = 2

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any], seed: int) -> None:
        super().__init__(transport, arena, {**args, "from_epoch": 0})
        assert len(arena.flat) % ALIGNMENT == 0
        self._seed = seed

    def average(self, step_barrier: StepBarrier) -> None:
        order = step_barrier.order
        seed = seed_of(Purpose.PAIRS, self._seed, order.epoch, order.step)
        ranks = np.random.default_rng(seed).permutation(self._world.size).tolist()
        place, size = ranks.index(self._world.rank), len(self._arena.flat)
        halves = (0, size), (size, 2 * size)
        mine, theirs = halves[place % 2], halves[1 - place % 2]
        self._buffer[slice(*mine)].copy_(self._arena.flat)
        fetch = Collective("broadcast", theirs, source=ranks[place ^ 1]) if place ^ 1 < len(ranks) else None
        self._buffer_transport.prepare(Collective("broadcast", mine, source=self._world.rank))
        self._buffer_transport.clock("barrier")
        step_barrier("gossip: all have prepared")
        self._buffer_transport.enter()
        self._buffer_transport.clock("exchange")
        if fetch:  # of an odd number of ranks one has no partner
            self._buffer_transport.work(fetch)
            self._blend(theirs)
        self._buffer_transport.clock("barrier")
        step_barrier("gossip: all have worked")
        if fetch:  # on GPUs it has been issued only: this rank's half must not change before it is read
            self._buffer_transport.complete(fetch)

    def _blend(self, half: tuple[int, int]) -> None:
        self._arena.flat.lerp_(self._buffer[slice(*half)], 0.5)

    def bytes_per_sync(self) -> int:
        return self._arena.flat.nbytes
