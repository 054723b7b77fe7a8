"""Rules: what trainers exchange after a step, when, and what of it belongs into a checkpoint.

A rule knows training and nothing of how bytes travel: that is a transport's business (lockstep/exchange).
Each says what it promises. making.py makes the one that the configuration names; each is a file of its own.
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


class Meeting:
    """The end of one step, at which all trainers may meet.

    name: of the step, for errors. payload: this trainer's small word to all the others; it goes with the
    first barrier, so that no step has a message more than it needs. all_payloads: everyone's, in rank order,
    when they have met; None before, and where a step ends without a meeting.
    """

    def __init__(self, group: Group, name: str, payload: Any, say: Callable[[str], None]) -> None:
        self._group, self._name, self._payload, self._say = group, name, payload, say
        self.all_payloads: list[Any] | None = None

    def take(self, payloads: list[Any]) -> None:
        """What all have said at the first barrier. A run over several hosts passes it on."""
        self.all_payloads = payloads

    def barrier(self, point: str) -> None:
        """For a transport's collectives. Raises PeerProblem naming who has not come."""
        self._say(f"{self._name}: meeting the others ({point})")
        if self.all_payloads is None:
            self.take(self._group.all_gather(f"{self._name}: {point}", self._payload))
        else:
            self._group.barrier(f"{self._name}: {point}")
        self._say(f"{self._name}: exchanging")


class Rule(ABC):
    """How trainers stay one. All ranks call the same methods at the same time.

    equal: whether all replicas are bitwise equal after each meeting; inside of `as_one` they always are.
    """

    equal = True

    def is_due(self, order: Order, n_samples: int) -> bool:
        """Whether trainers meet at the end of this step, whose last minibatch is `order`.

        n_samples: of an epoch, at whose last step they always meet. Where they don't, nobody waits for
        anybody, and nothing is printed, stopped or saved.
        """
        return True

    def end_backward(self) -> None:  # noqa: B027 (most have nothing to do then)
        """All gradients of a step are there, in this trainer."""

    @abstractmethod
    def update(self, optimizer: Any, meeting: Meeting | None) -> None:
        """Ends a step whose gradients are there: takes it, and exchanges what is due.

        optimizer: the program's (network/updater.py), with `step()`; of a rule by shards, the sharded one
        (network/sharded.py). meeting: None where none is due. Raises PeerProblem naming who has not come.
        """

    def as_one(self) -> AbstractContextManager[None]:
        """Inside, which is for validation and checkpoints, all arenas hold what the run answers with."""
        return nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of the rule besides the arena, by name. All ranks call it; it may meet.

        The result counts in rank 0.
        """
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027 (most keep nothing)
        """Takes what a checkpoint holds of a rule, of this one or another; empty at a run's beginning."""

    @abstractmethod
    def promise(self, config: Config, model: nn.Module) -> str:
        """What makes N trainers another training than one with N times the batch, a line for people.

        Empty where it is the same, up to rounding.
        """

    @abstractmethod
    def bytes_per_meeting(self) -> int:
        """That go into or come out of this trainer's memory at a meeting, from or to that of the others."""

    def close(self) -> None:  # noqa: B027 (most have opened nothing)
        """Lets go of what the rule has opened."""
