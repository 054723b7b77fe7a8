"""Rules: what trainers exchange after a step, when, and what of it belongs in a checkpoint.

A rule knows training; how bytes travel is a transport's job (lockstep/exchange). Each rule states its promise
to the user. factory.py makes the rule that the configuration names; every other rule has a file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.config import Config


class StepBarrier:
    """The barrier at the end of one step; a rule passes it to the collectives of its transport.

    Each trainer's payload travels with the first call, so that no step has a message more than it needs.

    Args:
        group: The trainers of this host.
        order: The step's last minibatch.
        payload: This trainer's message to all others, a small one.
        say: Shows what this trainer is at.

    Attributes:
        all_payloads: Of all trainers of this host, in rank order, after the first call; None before, and in
            a step without synchronization.
    """

    def __init__(self, group: Group, order: Order, payload: Any, say: Callable[[str], None]) -> None:
        self.order = order
        self._group, self._payload, self._say = group, payload, say
        self.all_payloads: list[Any] | None = None

    def __call__(self, point: str) -> None:
        """Wait until all trainers of this host have arrived. Raises PeerProblem naming one that has not."""
        self._say(f"{self.order}: waiting for the others ({point})")
        if self.all_payloads is None:
            self.all_payloads = self._group.all_gather(f"{self.order}: {point}", self._payload)
        else:
            self._group.barrier(f"{self.order}: {point}")
        self._say(f"{self.order}: exchanging")


class Rule(ABC):
    """The interface of a rule. All ranks call the same methods at the same time.

    Attributes:
        equal: Whether all replicas are bitwise equal after each synchronization. Inside `averaged` they are
            in any case.
    """

    equal = True

    def is_due(self, order: Order, n_samples: int) -> bool:
        """Return whether trainers synchronize at the end of a step.

        A step without synchronization has no barrier, and nothing is printed, stopped or saved after it.

        Args:
            order: The step's last minibatch.
            n_samples: Of an epoch. Trainers always synchronize at its last step.
        """
        return True

    def end_backward(self) -> None:  # noqa: B027 (most rules have nothing to do)
        """Note that all gradients of a step are complete in this trainer."""

    @abstractmethod
    def update(self, optimizer: Any, step_barrier: StepBarrier | None) -> None:
        """Take the optimizer's step, and exchange what is due.

        Args:
            optimizer: The program's `Updater`, or `ShardedUpdater` for a rule by shards
                (network/optimizer.py).
            step_barrier: To be passed to the collectives; None in a step without synchronization.

        Raises:
            PeerProblem: A trainer did not arrive in time; the message names it.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which all arenas hold the run's one answer, for validation and checkpoints."""
        return nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds of the rule besides the arena, by name.

        All ranks call it, and it may use collectives. Rank 0's result counts. The arena's block is as before;
        the optimizer's counts in `Arena.local` are now those of all ranks.
        """
        return {}

    def state_bytes(self) -> int:
        """Return the size of the tensors that `state` returns, in bytes. The same on all ranks."""
        return 0

    def load(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027 (most rules have no state)
        """Restore what a checkpoint holds of a rule, of this one or another; empty when a run begins."""

    @abstractmethod
    def promise(self, config: Config, model: nn.Module) -> str:
        """Return a line on why N trainers train differently from one with N times the batch.

        Empty if they train the same, up to rounding.
        """

    @abstractmethod
    def bytes_per_sync(self) -> int:
        """Return the bytes this rank reads and writes remotely per synchronization."""

    def close(self) -> None:  # noqa: B027 (most rules have opened nothing)
        """Close what the rule has opened."""
