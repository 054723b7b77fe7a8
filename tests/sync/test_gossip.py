"""The order of phases in which pairs of trainers fetch each other's replica."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.sync.gossip import GossipRule


class Phases:
    """A transport and a barrier that note what is called; the device's work lies behind `work`."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.order = SimpleNamespace(epoch=1, step=1)

    def __call__(self, point: str) -> None:
        self.called.append(point)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.called.append(name)


def make_rule(phases: Phases, rank: int, size: int) -> GossipRule:
    rule: Any = object.__new__(GossipRule)
    rule._world, rule._seed = SimpleNamespace(rank=rank, size=size), 0
    rule._arena, rule._buffer = SimpleNamespace(flat=torch.zeros(4)), torch.zeros(8)
    rule._buffer_transport = phases
    made: GossipRule = rule
    return made


@pytest.mark.parametrize("rank", range(3))
def test_a_half_changes_again_only_when_the_partner_has_read_it(rank: int) -> None:
    """On GPUs the second barrier says that the partner has issued its fetch, not that it is done."""
    phases = Phases()
    make_rule(phases, rank, 3).average(phases)  # type: ignore[arg-type]
    called = [each for each in phases.called if each != "clock"]
    before = ["prepare", "gossip: all have prepared", "enter"]
    alone = [*before, "gossip: all have worked"]
    paired = [*before, "work", "gossip: all have worked", "complete"]
    assert called in (alone, paired)


def test_of_three_trainers_two_are_a_pair() -> None:
    n_paired = 0
    for rank in range(3):
        phases = Phases()
        make_rule(phases, rank, 3).average(phases)  # type: ignore[arg-type]
        n_paired += "complete" in phases.called
    assert n_paired == 2
