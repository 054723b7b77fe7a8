"""The trainer's side of loading: minibatches in the order of orders, from a loader process or made here."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from lockstep.comm.messages import Fill, Filled, Order, Stop, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.dataset import Dataset, subtracting
from lockstep.errors import PeerLost
from lockstep.loading import Batch, Filler, Ring
from lockstep.loading.reader import Reader

if TYPE_CHECKING:
    from lockstep.backends import Backend


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
        self._arrived: deque[Filled] = deque()
        ring.offer(pipe)
        for slot in range(ring.shape.n_slots):
            self._order(slot)

    def next(self) -> Order:
        while not self._arrived or self._pipe.poll():
            filled = self._pipe.receive(Filled, "its next minibatch")
            self._ring.arrived(filled.slot, filled.order)
            self._arrived.append(filled)
        self._filled = self._arrived.popleft()
        self._ring.await_filled(self._filled.slot)
        return self._filled.order

    def batch(self) -> Batch:
        return self._ring.batch(self._filled.slot, self._filled.order)

    def release(self) -> None:
        self._ring.release(self._filled.slot)
        self._order(self._filled.slot)

    def close(self) -> None:
        self._ring.let_go()
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


class Network(Protocol):
    """What loading has to know of a network. mean: what it wants subtracted from R, G and B, or None."""

    crop_size: int
    mean: tuple[float, ...] | None


def open_feed(
    backend: "Backend",
    config: Config,
    dataset: Dataset,
    network: Network,
    orders: Iterator[Order],
    say: Callable[[str], object],
    loader: Pipe | None = None,
) -> Feed:
    """Wires ring, reader and feed: all that is needed for a network's minibatches to come.

    loader: the process that fills the ring; None: this one does, when it needs a minibatch. dataset: with its
    own mean or the network's, which is subtracted.
    """
    dataset = subtracting(dataset, network.mean)
    if loader:
        loader.send(Subtract(network.mean))
        ring = backend.make_ring(config, config.n_slots, network.crop_size, dataset.mean)
        return LoaderFeed(loader, ring, orders)
    ring = backend.make_ring(config, 1, network.crop_size, dataset.mean)
    filler = backend.fill_directly(ring, Reader(config, dataset, network.crop_size, say))
    return DirectFeed(filler, ring, orders)
