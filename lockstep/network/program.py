"""The interface of what a trainer runs: state in an arena, and what is done with a batch.

`Replica` implements it for torch networks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import nn

from lockstep.comm.messages import Order
from lockstep.errors import UserError
from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.loading import Batch
from lockstep.loading.slots import BlockLayout
from lockstep.network.arena import Arena
from lockstep.network.gradients import Gradients
from lockstep.network.optimizer import ShardedUpdater, Updater
from lockstep.network.recorder import Recorder


class Program(ABC):
    """All that a trainer needs from the network that it trains; another engine can implement it.

    Attributes:
        model: The network.
        arena: Everything that trainers exchange and checkpoints hold.
        optimizer: Takes steps on the arena.
        crop_size: Rows and columns of the images that the network takes.
        mean: Subtracted from each channel; None is the dataset's mean image.
        blocks: Blocks in which a GPU's kernel writes the images, or None.
        device: The device on which batches must be.
        implementations: How each part is computed, by name, in a few words.
        warn: Called with messages for the user; 'NAME: ...' updates the implementation of that name.
    """

    model: nn.Module
    arena: Arena
    optimizer: Updater | ShardedUpdater
    crop_size: tuple[int, int]
    mean: tuple[float, ...] | None
    blocks: BlockLayout | None = None
    device: torch.device
    implementations: Mapping[str, str] = MappingProxyType({})
    warn: Callable[[str], object] = staticmethod(lambda text: None)

    @abstractmethod
    def load(self, tensors: dict[str, torch.Tensor], source: str) -> dict[str, torch.Tensor]:
        """Load a checkpoint's tensors. Return those that belong to a rule (lockstep/sync).

        Args:
            tensors: By name.
            source: The checkpoint's name, for errors.

        Raises:
            UserError: The checkpoint is of another network.
        """

    @abstractmethod
    def shard_updates(self, transport: Transport) -> tuple[Gradients, ShardedUpdater, list[Span]]:
        """Have backward leave gradients in a block, and `optimizer` step on this rank's shards only.

        To be called once, before training, on an arena that was made with states_on_host.

        Args:
            transport: Connects the arenas of all trainers.

        Returns:
            The gradients, the sharded optimizer, and the spans of the shards on which it will be asked to
            step.
        """

    def share_statistics(self, transport: Transport) -> None:
        """Have batch normalisation use the statistics of all trainers' images (sync_batch_norm).

        All trainers call it at once; from then on they synchronize inside every forward_backward.

        Args:
            transport: Connects the arenas of all trainers.

        Raises:
            UserError: The network has no statistics that can be shared.
        """
        raise UserError("sync_batch_norm: this program has no statistics to share. Set it to false.")

    def close(self) -> None:
        """Free the arena, after all processes have closed it."""
        self.arena.block.close()

    @abstractmethod
    def begin_epoch(self, epoch: int, n_samples: int, learning_rate: float, position: int = 0) -> None:
        """Prepare an epoch of n_samples training samples in all, at this learning rate.

        Args:
            position: The number of samples that are trained on already, after a resume within the epoch.
        """

    @abstractmethod
    def begin_validation(self) -> None:
        """Evaluate, until the next epoch, as a user of the trained network would."""

    @abstractmethod
    def forward_backward(self, batch: Batch, mean_n_samples: float, rank: int, recorder: Recorder) -> None:
        """Add the gradient of a trainer's share of a minibatch, and add its loss to the recorder.

        Args:
            batch: This trainer's share.
            mean_n_samples: Mean number of samples per trainer in this step. The summed loss is divided by
                it, so that the mean over trainers is the loss of the whole step, however it was divided.
            rank: The trainer's global rank.
            recorder: Accumulates losses and errors.
        """

    @abstractmethod
    def count_errors(self, batch: Batch, answers: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Return [summed cross-entropy in nats, wrong top-1 answers, wrong top-5 answers], float64 (3,).

        With `task: multilabel`: [summed binary cross-entropy, wrong decisions, 0].

        Args:
            batch: This trainer's share.
            answers: Gets the label and the most probable class of each image, int64 (2, n). With `task:
                multilabel`: the logits, then the labels of each image, (n, 2 classes).
        """


class GradientCheck(Protocol):
    """A check of some logical ranks' gradients before they are summed."""

    def begin_step(self, order: Order) -> int | None:
        """Count a step, and return the logical rank that is checked in it, or None."""

    def compare(self, order: Order, bounds: tuple[int, ...], number: int, own: str) -> None:
        """Compare the digest of a gradient with that of another trainer, after all own passes."""

    def close(self) -> None:
        """Free what the check holds."""


class CheckedGradients(ABC):
    """The optional interface of a program whose gradients another trainer can compute again.

    Attributes:
        recheck: Called in every step, if it is set.
    """

    recheck: GradientCheck | None = None

    @abstractmethod
    def digest_of(self, batch: Batch, number: int) -> str:
        """Return the SHA-256 of the gradient of one logical rank, between backward and the update.

        Args:
            batch: Its images.
            number: The logical rank.
        """
