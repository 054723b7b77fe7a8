"""A minibatch in parts, each with its own forward and backward, whose gradients are added in one fixed tree.

So a sum has the same order, and the same bits, whoever computes which parts (`parts` in the configuration).
"""

import dataclasses
from collections.abc import Iterator

import torch

from lockstep.data.sampling import share
from lockstep.loading import Batch
from lockstep.network.arena import Arena
from lockstep.network.gradients import Gradients


def parts_of(batch: Batch, rank: int, size: int, n_parts: int) -> Iterator[tuple[int, Batch]]:
    """The number and the pictures of each part that rank `rank` of `size` computes: a copy of its own."""
    order, n_own = batch.order, n_parts // size
    for number in range(rank * n_own, (rank + 1) * n_own):
        first, last = share(order.start, order.stop, number, n_parts)
        yield number, _part(batch, first, last)


def parts_within(batch: Batch, n_parts: int) -> Iterator[Batch]:
    """Those of a minibatch's parts that a trainer's share of it holds, without empty ones."""
    order = batch.order
    for number in range(n_parts):
        first, last = share(order.start, order.stop, number, n_parts)
        if order.first <= first < last <= order.last:
            yield _part(batch, first, last)


def _part(batch: Batch, first: int, last: int) -> Batch:
    own = slice(first - batch.order.first, last - batch.order.first)
    order = dataclasses.replace(batch.order, first=first, last=last)
    return Batch(order, batch.images[own].clone(), batch.labels[own].clone(), batch.samples[own].clone())


class PartSums:
    """Adds up the gradients of consecutive parts as a binary tree does: pairs, then pairs of pairs.

    Every part begins with the buffers (statistics of norms) that the step has begun with; what it makes of
    them is added up like the gradients. Needs log2 of the number of parts more blocks of gradients.
    """

    def __init__(self, arena: Arena, gradients: Gradients) -> None:
        self._arena, self._gradients = arena, gradients
        self._sums: list[torch.Tensor] = []  # of 2^k parts each, larger ones first
        self._n_done = 0

    def begin(self) -> None:
        """Before the first part of a step."""
        first, last = self._arena.buffers_span
        self._floats = self._arena.flat[first:last]
        self._begin = self._floats.clone()
        counts = (value for name, value in self._arena.local.items() if name.startswith("buffers/"))
        self._counts = [(count, count.clone()) for count in counts]
        self._sums, self._n_done = [], 0

    def begin_part(self) -> None:
        if self._n_done:
            self._sums.append(self._gradients.flat.clone())
            self._gradients.clear()
        self._floats.copy_(self._begin)
        for count, begin in self._counts:
            count.copy_(begin)

    def end_part(self) -> None:
        """The sum of what belongs together by now is in the block of the gradients."""
        self._gradients.complete()
        self._n_done += 1
        level = self._n_done
        while level % 2 == 0:
            self._gradients.flat.add_(self._sums.pop())
            level //= 2
