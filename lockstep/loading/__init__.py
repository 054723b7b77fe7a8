"""The two ends of a ring of slots: a trainer takes minibatches from it, a loader fills it.

The *ring* is the trainer's end and owns the memory. The *filler* is the other one: in a loader process, or,
with `para_load: false`, in the trainer itself. Who may touch a slot is told by messages (`Fill`, `Filled`);
on a GPU, events say when the device has come so far.

orders.py says which minibatches are wanted, reader.py reads them and draws crops and mirrors, slots.py is
where they lie, host.py, cuda.py and uploading.py are rings and fillers, feed.py is what the trainer's loop
asks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.loading.slots import RingShape, Slot

if TYPE_CHECKING:  # a loader for CPUs has no need of torch
    import torch


@dataclass(frozen=True)
class Batch:
    """A trainer's part of a minibatch: images (n, 3, size, size), in blocks (n, channel, count, count), lying
    channels last, labels and sample numbers int64 (n,), all on the network's device. Views: valid until the
    feed's `release`."""

    order: Order
    images: "torch.Tensor"
    labels: "torch.Tensor"
    samples: "torch.Tensor"


class Ring(ABC):
    """The trainer's end."""

    shape: RingShape

    @abstractmethod
    def offer(self, pipe: Pipe) -> None:
        """Sends a loader all that it needs to fill the slots: the shape, then handles."""

    def arrived(self, number: int, order: Order) -> None:  # noqa: B027 (most rings have nothing to do)
        """As soon as a `Filled` is here, which may be before its minibatch is wanted."""

    @abstractmethod
    def await_filled(self, number: int) -> None:
        """After `Filled`: what is asked of the device from now on needs what is in the slot."""

    @abstractmethod
    def batch(self, number: int, order: Order) -> Batch:
        """What was filled into a slot, as the network takes it."""

    @abstractmethod
    def release(self, number: int) -> None:
        """What has been asked of the device so far is all that needs the slot."""

    def let_go(self) -> None:  # noqa: B027 (most rings have nothing to let go of)
        """Before whoever fills it leaves: lets go of what is theirs. Nothing is taken out any more."""

    @abstractmethod
    def close(self) -> None:
        """Frees the memory; whoever filled it has let go of it before."""


class Filler(ABC):
    """The loader's end."""

    @abstractmethod
    def fill(self, number: int, order: Order) -> None:
        """Reads what is ordered and sees to it that it comes into the slot."""

    @abstractmethod
    def close(self) -> None:
        """Waits until all is in place, and lets go of the trainer's memory."""


def batch_of(order: Order, slot: "Slot[torch.Tensor]") -> Batch:
    """The filled part of a slot that holds what the network takes."""
    n_samples = order.last - order.first
    images = slot.images[:n_samples].permute(0, 3, 1, 2)
    return Batch(order, images, slot.labels[:n_samples], slot.samples[:n_samples])
