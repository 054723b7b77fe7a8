"""What a trainer runs: state in an arena, and what is done with a batch.

Replica is the one for torch networks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.loading import Batch
from lockstep.loading.slots import Blocks
from lockstep.memory import Memory
from lockstep.network.arena import Arena
from lockstep.network.gradients import Gradients
from lockstep.network.recorder import Recorder
from lockstep.network.sharded import ShardedUpdater
from lockstep.network.updater import Updater


class Program(ABC):
    """A trainer asks nothing else of what it trains; another engine can stand here.

    model: the network. arena: everything that trainers exchange and checkpoints hold. optimizer: takes steps
    on it. crop_size: rows and columns of the pictures that it takes. mean: what it wants subtracted from R, G
    and B, or None: the dataset's mean. blocks: in which a GPU's kernel is to make its pictures, or None.
    device: where batches have to be. ways: which way its parts are computed, by name, in words. tell: called
    with what a user should know of how it trains; 'NAME: ...' is news of one of the ways.
    """

    model: nn.Module
    arena: Arena
    optimizer: Updater | ShardedUpdater
    crop_size: int
    mean: tuple[float, ...] | None
    blocks: Blocks | None = None
    device: torch.device
    ways: Mapping[str, str] = MappingProxyType({})
    tell: Callable[[str], object] = staticmethod(lambda text: None)

    @abstractmethod
    def load(self, tensors: Path) -> dict[str, torch.Tensor]:
        """Takes a checkpoint's state. Returns what in it is a rule's (lockstep/sync).

        Raises UserError where it is broken or of another network.
        """

    @abstractmethod
    def shard_updates(
        self, memory: Memory, transport: Transport
    ) -> tuple[Gradients, ShardedUpdater, list[Span]]:
        """From now on backward leaves gradients in a block, and `optimizer` steps on this rank's shards.

        transport: over the arenas of all trainers. Returns also the pieces of those shards that the optimizer
        will be asked to step on. To be called once, before training, where the arena was made with
        states_apart.
        """

    def share_statistics(self, transport: Transport, memory: Memory, clock: Callable[[str], None]) -> None:
        """From now on batch normalisation takes the statistics of all trainers' pictures (sync_batch_norm).

        transport: over the arenas. clock: a stopwatch's `enter`. All trainers call it at once, and meet in
        every forward_backward from then on. Raises UserError where the network can't.
        """
        raise UserError("sync_batch_norm: this program has no statistics to share: set it to false")

    def close(self) -> None:
        """When all have let go of the arena."""
        self.arena.block.close()

    @abstractmethod
    def begin_epoch(self, epoch: int, n_samples: int, learning_rate: float) -> None:
        """Sets what is the epoch's, of n_samples training samples in all."""

    @abstractmethod
    def begin_validation(self) -> None:
        """Until the next epoch, answers are those that a user of the trained network would get."""

    @abstractmethod
    def forward_backward(self, batch: Batch, mean_share: float, rank: int, recorder: Recorder) -> None:
        """Adds the gradient of a trainer's share of a minibatch, and its loss to the recorder.

        The loss is summed and divided by `mean_share`, the mean number of samples that a trainer has in this
        step: so the mean over the trainers is that of the whole step, however it was divided.
        """

    @abstractmethod
    def count_errors(self, batch: Batch) -> torch.Tensor:
        """[summed cross-entropy in nats, wrong top-1 answers, wrong top-5 answers], float64 (3,)."""
