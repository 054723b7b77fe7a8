"""The trainer's side of loading: minibatches in the order of orders, from a loader process or made here."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress

from lockstep.errors import PeerLost
from lockstep.loading import Batch, Filler, Ring
from lockstep.messages import Fill, Filled, Order, Stop
from lockstep.pipes import Pipe


class Feed(ABC):
    """Hands out one batch at a time: `next`, `batch`, use it, `release`."""

    @abstractmethod
    def next(self) -> Order:
        """Waits for the minibatch of the next order, and returns that."""

    @abstractmethod
    def batch(self) -> Batch:
        """The minibatch that `next` has waited for."""

    @abstractmethod
    def release(self) -> None:
        """Says that this minibatch is done with."""

    @abstractmethod
    def close(self) -> None:
        """Ends loading."""


class LoaderFeed(Feed):
    """A loader process fills the slots: while one is used, the others are being filled or wait full."""

    def __init__(self, pipe: Pipe, ring: Ring, orders: Iterator[Order]) -> None:
        self._pipe, self._ring, self._orders = pipe, ring, orders
        ring.offer(pipe)
        for slot in range(ring.shape.n_slots):
            self._order(slot)

    def next(self) -> Order:
        self._filled = self._pipe.receive(Filled, "its next minibatch")
        self._ring.await_filled(self._filled.slot)
        return self._filled.order

    def batch(self) -> Batch:
        return self._ring.batch(self._filled.slot, self._filled.order)

    def release(self) -> None:
        self._ring.release(self._filled.slot)
        self._order(self._filled.slot)

    def close(self) -> None:
        self._pipe.send(Stop())
        with suppress(PeerLost):  # it answers what was ordered, lets go of the ring, and leaves
            while True:
                self._pipe.receive(object, "to leave")
        self._ring.close()

    def _order(self, slot: int) -> None:
        order = next(self._orders, None)
        if order is not None:
            self._pipe.send(Fill(slot, order))


class DirectFeed(Feed):
    """`para_load: false`: the trainer fills one slot itself, when it needs it, in the same way."""

    def __init__(self, filler: Filler, ring: Ring, orders: Iterator[Order]) -> None:
        self._filler, self._ring, self._orders = filler, ring, orders

    def next(self) -> Order:
        self._current = next(self._orders)
        self._filler.fill(0, self._current)
        self._ring.await_filled(0)
        return self._current

    def batch(self) -> Batch:
        return self._ring.batch(0, self._current)

    def release(self) -> None:
        self._ring.release(0)

    def close(self) -> None:
        self._filler.close()
        self._ring.close()
