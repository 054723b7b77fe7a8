"""The trainer's iterator over its minibatches, filled by a loader process or by the trainer itself."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from lockstep.comm.messages import Fill, Filled, Order, Stop, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.dataset import Dataset, with_mean
from lockstep.errors import PeerLost
from lockstep.loading import Batch, Filler, Ring
from lockstep.loading.reader import Reader
from lockstep.loading.slots import BlockLayout

if TYPE_CHECKING:
    from lockstep.backends import Backend


class Feed(ABC):
    """One minibatch at a time, in the order of the orders: `next`, `batch`, use it, `release`."""

    @abstractmethod
    def next(self) -> Order:
        """Wait for the next minibatch and return its order."""

    @abstractmethod
    def batch(self) -> Batch:
        """Return the minibatch that `next` has waited for."""

    @abstractmethod
    def release(self) -> None:
        """Give the minibatch's slot back."""

    @abstractmethod
    def close(self) -> None:
        """End loading and free the ring."""


class LoaderFeed(Feed):
    """A feed whose slots a loader process fills: while one slot is used, the others are filled ahead.

    Args:
        pipes: To the loader, and to the loaders that the launcher starts in its place when it dies. A
            replacement gets the unfilled orders again.
        ring: The slots.
        orders: The minibatches to load.
        mean: Subtracted from each channel; None is the dataset's mean image.
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
        first = enumerate(islice(orders, ring.shape.n_slots))  # at the start all slots are free
        self._unfilled = deque(Fill(slot, order) for slot, order in first)  # orders sent, oldest first
        self._ready: deque[Filled] = deque()
        self._connect()

    def next(self) -> Order:
        while not self._ready or self._pipe.poll():
            try:
                self._record(self._pipe.receive(Filled, "its next minibatch"))
            except PeerLost as lost:
                self._replace(lost)
        self._filled = self._ready.popleft()
        self._ring.acquire(self._filled.slot)
        return self._filled.order

    def batch(self) -> Batch:
        return self._ring.batch(self._filled.slot, self._filled.order)

    def release(self) -> None:
        self._ring.release(self._filled.slot)
        self._order(self._filled.slot)

    def close(self) -> None:
        self._ring.disconnect()
        self._send(Stop())
        for spare in self._spares:  # a replacement may have started without our noticing the loss
            with suppress(PeerLost):
                spare.send(Stop())
        with suppress(PeerLost):  # the loader answers open orders, closes the ring, and exits
            while True:
                self._pipe.receive(object, "to leave")
        self._ring.close()

    def _record(self, filled: Filled) -> None:
        self._unfilled.popleft()  # a loader fills slots in the order of the orders
        self._ring.on_filled(filled.slot, filled.order)
        self._ready.append(filled)

    def _order(self, slot: int) -> None:
        order = next(self._orders, None)
        if order is None:
            return
        self._unfilled.append(Fill(slot, order))
        self._send(self._unfilled[-1])

    def _send(self, message: Fill | Stop) -> None:
        """Send a message. If the loader is lost and has a replacement, `next` switches to that later."""
        try:
            self._pipe.send(message)
        except PeerLost:
            if not self._spares:
                raise

    def _connect(self) -> None:
        """Send a loader the mean, the ring's handles and the unfilled orders."""
        try:
            self._pipe.send(Subtract(self._mean))
            self._ring.connect(self._pipe)
            for fill in self._unfilled:
                self._pipe.send(fill)
        except PeerLost as lost:
            self._replace(lost)

    def _replace(self, lost: PeerLost) -> None:
        """Switch to the loader that the launcher starts in place of a lost one; raise if there is none."""
        if not self._spares:
            raise lost
        self._pipe = self._spares.pop(0)
        self._connect()


class DirectFeed(Feed):
    """A feed that fills its only slot itself when a minibatch is needed (`para_load: false`)."""

    def __init__(self, filler: Filler, ring: Ring, orders: Iterator[Order]) -> None:
        self._filler, self._ring, self._orders = filler, ring, orders

    def next(self) -> Order:
        self._current = next(self._orders)
        self._filler.fill(0, self._current)
        self._ring.acquire(0)
        return self._current

    def batch(self) -> Batch:
        return self._ring.batch(0, self._current)

    def release(self) -> None:
        self._ring.release(0)

    def close(self) -> None:
        self._filler.close()
        self._ring.close()


class NetworkInput(Protocol):
    """The images that a network takes.

    Attributes:
        crop_size: Rows and columns of its images.
        mean: Subtracted from each channel, or None for the dataset's mean image.
        blocks: Blocks in which a GPU's kernel writes its images, or None.
    """

    crop_size: tuple[int, int]
    mean: tuple[float, ...] | None
    blocks: BlockLayout | None


def open_feed(
    backend: "Backend",
    config: Config,
    dataset: Dataset,
    network: NetworkInput,
    orders: Iterator[Order],
    say: Callable[[str], object],
    loaders: Sequence[Pipe] = (),
) -> Feed:
    """Return the feed of a network's minibatches, with its ring and reader.

    Args:
        backend: The back end of the trainer's device.
        dataset: Its mean or the network's is subtracted.
        say: Called with a line about the current activity, for the status board.
        loaders: Pipes to the loader and its replacements. If empty, this process reads each minibatch when it
            needs it.
    """
    dataset, size = with_mean(dataset, network.mean), network.crop_size
    n_slots = config.n_slots if loaders else 1
    ring = backend.make_ring(config, n_slots, size, dataset.mean, network.blocks, dataset.n_labels)
    if loaders:
        return LoaderFeed(loaders, ring, orders, network.mean)
    filler = backend.fill_directly(ring, Reader(config, dataset, size, say, ring.shape.changes))
    return DirectFeed(filler, ring, orders)
