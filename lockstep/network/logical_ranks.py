"""Minibatches in logical ranks, whose gradients are added in one fixed binary tree (`logical_ranks`).

Each logical rank has a forward and a backward pass of its own. The sum thus has the same order, and the same
bits, for any assignment of logical ranks to trainers (lockstep/exchange/tree.py).
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn

from lockstep.config import Config
from lockstep.config.shares import bounds_of, most_of
from lockstep.data.sampling import share
from lockstep.errors import UserError
from lockstep.exchange.tree import Node, maximal_subtrees, n_sums
from lockstep.loading import Batch
from lockstep.network.arena import Arena, restoring
from lockstep.network.gradients import Gradients


def n_partial_sums(config: Config) -> int:
    """Return how many partial sums the gradients of a trainer need: 1 without `logical_ranks`.

    All trainers have room for as many, those of the least favourable range that `shares` can give.
    """
    if config.logical_ranks is None:
        return 1
    bounds, n_logical = bounds_of(config), config.logical_ranks
    ranges = list(pairwise(bounds))
    if config.shares == "auto":
        sizes, firsts = range(1, most_of(config) + 1), range(n_logical)
        ranges = [(first, min(first + size, n_logical)) for size in sizes for first in firsts]
    return max(len(maximal_subtrees(leaves, (0, n_logical))) for leaves in ranges)


def shares_to_train(batch: Batch, leaves: Node, n_logical: int) -> Iterator[tuple[int, Batch]]:
    """Yield (logical rank, copy of its images) for consecutive logical ranks [first, last)."""
    order = batch.order
    for number in range(*leaves):
        first, last = share(order.start, order.stop, number, n_logical)
        yield number, _cut(batch, first, last)


def shares_within(batch: Batch, n_logical: int) -> Iterator[Batch]:
    """Yield the non-empty logical ranks' shares that lie in a trainer's share of a minibatch."""
    order = batch.order
    for number in range(n_logical):
        first, last = share(order.start, order.stop, number, n_logical)
        if order.first <= first < last <= order.last:
            yield _cut(batch, first, last)


def _cut(batch: Batch, first: int, last: int) -> Batch:
    own = slice(first - batch.order.first, last - batch.order.first)
    order = dataclasses.replace(batch.order, first=first, last=last)
    others, weights = batch.other_labels, batch.label_weights
    return Batch(
        order,
        batch.images[own].clone(),
        batch.labels[own].clone(),
        batch.samples[own].clone(),
        None if others is None else others[own].clone(),
        None if weights is None else weights[own].clone(),
    )


class LogicalRankSums:
    """The partial sums of the gradients of consecutive logical ranks, each of a maximal subtree.

    Every logical rank begins with the buffers (running statistics) of the beginning of the step; the results
    are added like gradients. A sum that waits for its sibling lies in a further part of the gradients' block,
    where the exchange finds those that are left at the end, or in memory of this process.

    Args:
        model: The network.
        arena: Holds the buffers.
        gradients: The sums are made in them.
        n_logical: The number of all logical ranks.
    """

    def __init__(self, model: nn.Module, arena: Arena, gradients: Gradients, n_logical: int) -> None:
        self._named = list(model.named_parameters())
        self._arena, self._gradients, self._n_logical = arena, gradients, n_logical
        self._places = list(gradients.further)
        self._n_waiting = 0

    def begin_step(self, first: int) -> None:
        """Save the buffers that every logical rank of the step begins with. first: The first logical rank."""
        start, stop = self._arena.buffers_span
        self._floats = self._arena.flat[start:stop]
        self._begin = self._floats.clone()
        self._counts = [(count, count.clone()) for count in self._arena.counts]
        self._ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions = [(name, p, p._version) for name, p in self._named]
        self._first = self._next = first
        self._n_waiting = 0

    def check_unchanged(self) -> None:
        """Check that no pass of this step has changed a parameter.

        Raises:
            UserError: One has, once for each logical rank of this trainer.
        """
        for name, value, version in self._versions:
            if value._version != version:
                is_trained = value.requires_grad
                cure = "Compute with a changed copy" if is_trained else "Make it a buffer (register_buffer)"
                raise UserError(
                    f"the model's {name} is a parameter and is changed by its forward pass, which a step "
                    f"calls once for each of the logical_ranks. {cure}."
                )

    def begin_rank(self, has_images: bool) -> None:
        """Put the sum so far aside, and restore the buffers of the beginning of the step.

        After a logical rank without images, integer buffers are as the one before it has left them.
        """
        self._ends = []
        if self._next > self._first:
            if not has_images:
                self._ends = [(count, count.clone()) for count, _ in self._counts]
            if self._n_waiting == len(self._places):
                self._places.append(torch.empty_like(self._gradients.flat))
            self._places[self._n_waiting].copy_(self._gradients.flat)
            self._n_waiting += 1
            self._gradients.clear()
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        self._floats.copy_(self._begin)
        _copy_all(self._counts)

    def digest(self) -> str:
        """Complete the gradient of the present logical rank, and return its SHA-256."""
        self._gradients.complete()
        return hashlib.sha256(self._gradients.flat.detach().cpu().numpy().data).hexdigest()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep all sums and counts while the block computes one more logical rank; restore them after it."""
        with restoring([self._gradients.flat, *(count for count, _ in self._counts)]):
            self._gradients.clear()
            self._restore_buffers()
            yield

    def end_rank(self) -> None:
        """Take the sums that are complete now, so that the block of gradients begins with the last one."""
        _copy_all(self._ends)
        self._gradients.complete()
        for _ in range(n_sums(self._next, self._first, self._n_logical)):
            self._n_waiting -= 1
            self._gradients.flat.add_(self._places[self._n_waiting])
        self._next += 1


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)
