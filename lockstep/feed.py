"""The trainer's side of loading: minibatches in the order of orders, from a loader process or made here."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from lockstep.errors import PeerLost
from lockstep.memory import Block, Memory
from lockstep.messages import Fill, Filled, Order, Stop
from lockstep.pipes import Pipe
from lockstep.slots import RingShape, Slot


@dataclass(frozen=True)
class Batch:
    """A trainer's part of a minibatch: images float32 (n, 3, size, size) lying channels last, labels and
    sample numbers int64 (n,). Views of a slot: valid until the feed's `release`."""

    order: Order
    images: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor


class Feed(ABC):
    """Hands out one batch at a time: `next`, use it, `release`."""

    @abstractmethod
    def next(self) -> Batch:
        """The batch of the next order, waiting for it where need be."""

    @abstractmethod
    def release(self) -> None:
        """Says that the batch last handed out is done with."""

    @abstractmethod
    def close(self) -> None:
        """Ends loading."""


class LoaderFeed(Feed):
    """A loader process fills the slots: while one is used, the others are being filled or wait full."""

    def __init__(self, pipe: Pipe, memory: Memory, shape: RingShape, orders: Iterator[Order]) -> None:
        self._pipe = pipe
        self._orders = orders
        self._block = memory.allocate(shape.n_bytes)
        pipe.send(shape)
        self._block.send(pipe)
        self._slots = shape.slots(self._block)
        for slot in range(shape.n_slots):
            self._order(slot)

    def next(self) -> Batch:
        filled = self._pipe.receive(Filled, "its next minibatch")
        self._in_use = filled.slot
        return _batch(filled.order, self._slots[filled.slot])

    def release(self) -> None:
        self._order(self._in_use)

    def close(self) -> None:
        self._pipe.send(Stop())
        with suppress(PeerLost):  # it answers what was ordered, then it leaves
            while True:
                self._pipe.receive(object, "to leave")

    def _order(self, slot: int) -> None:
        order = next(self._orders, None)
        if order is not None:
            self._pipe.send(Fill(slot, order))


class DirectFeed(Feed):
    """`para_load: False`: the trainer fills one slot itself, when it needs it, with the same function."""

    def __init__(
        self,
        fill: Callable[[Slot, Order], None],
        block: Block,
        shape: RingShape,
        orders: Iterator[Order],
    ) -> None:
        self._fill = fill
        self._orders = orders
        self._block = block
        self._slot = shape.slots(block)[0]

    def next(self) -> Batch:
        order = next(self._orders)
        self._fill(self._slot, order)
        return _batch(order, self._slot)

    def release(self) -> None:
        """Nobody waits for the slot."""

    def close(self) -> None:
        self._block.close()


def _batch(order: Order, slot: Slot) -> Batch:
    n_samples = order.last - order.first
    images = slot.images[:n_samples].permute(0, 3, 1, 2)
    return Batch(order, images, slot.labels[:n_samples], slot.samples[:n_samples])
