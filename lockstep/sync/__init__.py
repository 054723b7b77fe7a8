"""Rules: what trainers exchange after a step, when, and what of it belongs into a checkpoint.

A rule knows training and nothing of how bytes travel: that is a transport's business (lockstep/exchange).
Each says what it promises. There is one so far, `weights`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.comm.group import Group
from lockstep.config import Config


class Optimizer(Protocol):
    """What a rule updates with: see updater.py."""

    def step(self) -> None:
        """Takes a step with the gradients that backward has added up."""


class Meeting:
    """The end of one step, at which all trainers may meet.

    name: of the step, for errors. payload: this trainer's small word to all the others; it goes with the
    first barrier, so that no step has a message more than it needs. all_payloads: everyone's, in rank order,
    when they have met; None before, and where a step ends without a meeting.
    """

    def __init__(self, group: Group, name: str, payload: Any, say: Callable[[str], None]) -> None:
        self._group, self._name, self._payload, self._say = group, name, payload, say
        self.all_payloads: list[Any] | None = None

    def barrier(self, point: str) -> None:
        """For a transport's collectives. Raises PeerProblem naming who has not come."""
        self._say(f"{self._name}: meeting the others ({point})")
        if self.all_payloads is None:
            self.all_payloads = self._group.all_gather(f"{self._name}: {point}", self._payload)
        else:
            self._group.barrier(f"{self._name}: {point}")
        self._say(f"{self._name}: exchanging")


class Rule(ABC):
    """How trainers stay one."""

    @abstractmethod
    def update(self, optimizer: Optimizer, meeting: Meeting) -> None:
        """Ends a step whose gradients are there: takes it, and exchanges what is due."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of the rule besides the arena, by name; views, not copies."""

    @abstractmethod
    def inexact_parts(self, config: Config, model: nn.Module) -> list[str]:
        """What makes N trainers differ from one with N times the batch, by more than rounding; for people."""
