"""The trainer's side of loading: minibatches in the order of orders, from a loader process or made here."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from lockstep.comm.messages import Fill, Filled, Order, Stop, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.dataset import Dataset, subtracting
from lockstep.errors import PeerLost
from lockstep.loading import Batch, Filler, Ring
from lockstep.loading.reader import Reader
from lockstep.loading.slots import Blocks

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
    """A loader process fills the slots: while one is used, the others are being filled or wait full.

    pipes: to the loader, and to those that the launcher starts in its place when it dies. Such a one gets the
    orders again that had not been filled. mean: what the network wants subtracted.
    """

    def __init__(
        self,
        pipes: Sequence[Pipe],
        ring: Ring,
        orders: Iterator[Order],
        mean: tuple[float, ...] | None = None,
    ) -> None:
        self._ring, self._orders, self._mean = ring, orders, mean
        self._pipe, *self._spares = pipes
        free = zip(range(ring.shape.n_slots), orders, strict=False)
        self._ordered = deque(Fill(slot, order) for slot, order in free)  # and not filled yet
        self._arrived: deque[Filled] = deque()
        self._begin()

    def next(self) -> Order:
        while not self._arrived or self._pipe.poll():
            try:
                self._arrive(self._pipe.receive(Filled, "its next minibatch"))
            except PeerLost as lost:
                self._replace(lost)
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
        self._send(Stop())
        for spare in self._spares:  # for a loader that takes the place of one that nobody has missed
            with suppress(PeerLost):
                spare.send(Stop())
        with suppress(PeerLost):  # it answers what was ordered, lets go of the ring, and leaves
            while True:
                self._pipe.receive(object, "to leave")
        self._ring.close()

    def _arrive(self, filled: Filled) -> None:
        self._ordered.popleft()  # a loader fills them in order
        self._ring.arrived(filled.slot, filled.order)
        self._arrived.append(filled)

    def _order(self, slot: int) -> None:
        order = next(self._orders, None)
        if order is None:
            return
        self._ordered.append(Fill(slot, order))
        self._send(self._ordered[-1])

    def _send(self, message: Fill | Stop) -> None:
        """Where the loader has gone, `next` turns to another, after what this one has filled."""
        try:
            self._pipe.send(message)
        except PeerLost:
            if not self._spares:
                raise

    def _begin(self) -> None:
        """Tells a loader all that it needs, and what is on order."""
        try:
            self._pipe.send(Subtract(self._mean))
            self._ring.offer(self._pipe)
            for fill in self._ordered:
                self._pipe.send(fill)
        except PeerLost as lost:
            self._replace(lost)

    def _replace(self, lost: PeerLost) -> None:
        """Turns to the loader that is started in the place of one that has gone; raises where none is."""
        if not self._spares:
            raise lost
        self._pipe = self._spares.pop(0)
        self._begin()


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
    """What loading has to know of a network. mean: what it wants subtracted from R, G and B, or None.
    blocks: in which a GPU's kernel is to make its pictures, or None."""

    crop_size: int
    mean: tuple[float, ...] | None
    blocks: Blocks | None


def open_feed(
    backend: "Backend",
    config: Config,
    dataset: Dataset,
    network: Network,
    orders: Iterator[Order],
    say: Callable[[str], object],
    loaders: Sequence[Pipe] = (),
) -> Feed:
    """Wires ring, reader and feed: all that is needed for a network's minibatches to come.

    loaders: the process that fills the ring, and those in its place if it dies; none: this process does, when
    it needs a minibatch. dataset: with its own mean or the network's, which is subtracted.
    """
    dataset = subtracting(dataset, network.mean)
    size, blocks = network.crop_size, network.blocks
    if loaders:
        ring = backend.make_ring(config, config.n_slots, size, dataset.mean, blocks)
        return LoaderFeed(loaders, ring, orders, network.mean)
    ring = backend.make_ring(config, 1, size, dataset.mean, blocks)
    filler = backend.fill_directly(ring, Reader(config, dataset, size, say))
    return DirectFeed(filler, ring, orders)
