"""The two ends of a ring of slots: a loader fills it with minibatches, and a trainer takes them from it.

The *ring* is the trainer's end and owns the memory. The *filler* is the loader's end; with `para_load: false`
it is in the trainer's process as well. Messages (`Fill`, `Filled`) say which end may use a slot; on a GPU,
events say when the device has finished with it.

- `orders.py` lists the minibatches to load.
- `reader.py` reads them from files, and draws crops, mirrors and colour shifts.
- `slots.py` is the memory layout of a slot.
- `host.py`, `cuda.py` and `uploading.py` are the rings and fillers.
- `feed.py` is the iterator in the trainer's loop.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.loading.slots import RingShape, Slot

if TYPE_CHECKING:  # the launcher imports this package, with lockstep.backends, without torch
    import torch


@dataclass(frozen=True)
class Batch:
    """A trainer's share of a minibatch, on the network's device. Views: valid until the feed's `release`.

    Attributes:
        order: The order that it answers.
        images: (n, channel, row, column), or in blocks (n, channel, count, count); channels last.
        labels: int64 (n,), or with `task: multilabel` 0 and 1, uint8 (n, class).
        samples: Sample numbers, int64 (n,).
        other_labels: The second labels of mixed images, like `labels`. None: no image is mixed.
        label_weights: The share of `labels` in each image, float32 (n,). None: no image is mixed.
    """

    order: Order
    images: "torch.Tensor"
    labels: "torch.Tensor"
    samples: "torch.Tensor"
    other_labels: "torch.Tensor | None" = None
    label_weights: "torch.Tensor | None" = None


class Ring(ABC):
    """The trainer's end of a ring."""

    shape: RingShape

    @abstractmethod
    def connect(self, pipe: Pipe) -> None:
        """Send a loader what it needs to fill the slots: the shape, then handles of memory and events."""

    def on_filled(self, number: int, order: Order) -> None:  # noqa: B027 (most rings have nothing to do)
        """Handle a `Filled` message, which may arrive before its minibatch is needed."""

    @abstractmethod
    def acquire(self, number: int) -> None:
        """Make later work of the device wait until the slot's contents have arrived. `Filled` comes first."""

    @abstractmethod
    def batch(self, number: int, order: Order) -> Batch:
        """Return a slot's minibatch as the network takes it."""

    @abstractmethod
    def release(self, number: int) -> None:
        """Let the filler reuse the slot once the device has done the work issued so far."""

    def disconnect(self) -> None:  # noqa: B027 (most rings have nothing to close)
        """Close the filler's resources before the filler exits. No slot is used any more."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, after the filler has closed it."""


class Filler(ABC):
    """The loader's end of a ring."""

    @abstractmethod
    def fill(self, number: int, order: Order) -> None:
        """Read the ordered minibatch and bring it into a slot; the device may do so later."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all slots are filled, and close the trainer's memory."""


def batch_of(order: Order, slot: "Slot[torch.Tensor]") -> Batch:
    """Return the filled part of a slot whose images are as the network takes them."""
    n_samples = order.last - order.first
    images = slot.images[:n_samples].permute(0, 3, 1, 2)
    rest = slot.labels, slot.samples, slot.other_labels, slot.label_weights
    return Batch(order, images, *(each[:n_samples] for each in rest))
