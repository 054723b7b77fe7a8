"""The factory of the rule that a configuration names."""

import torch

from lockstep.config import Config
from lockstep.config.rules import rule_args_of, rule_of
from lockstep.exchange.transport import Transport
from lockstep.network.program import Program
from lockstep.sync import Rule
from lockstep.sync.elastic import ElasticRule
from lockstep.sync.gossip import GossipRule
from lockstep.sync.gradients import GradientsRule
from lockstep.sync.local import LocalRule
from lockstep.sync.outer import OuterRule
from lockstep.sync.weights import WeightsRule


def make_rule(config: Config, program: Program, transport: Transport, saved: dict[str, torch.Tensor]) -> Rule:
    """Make the rule. All ranks call it at once, when the program has its initial state.

    Args:
        config: The run's.
        program: Whose arena and updates the rule takes over.
        transport: Over the arenas of all trainers.
        saved: What the checkpoint to resume from holds of its rule, which may be another one.
    """
    rule = _make(config, program, transport)
    rule.load(saved)
    return rule


def _make(config: Config, program: Program, transport: Transport) -> Rule:
    name, arena = rule_of(config), program.arena
    if name == "gradients":
        return GradientsRule(config, transport, program)
    if name == "local":
        return LocalRule(transport, arena, rule_args_of(config))
    if name == "outer":
        return OuterRule(transport, arena, rule_args_of(config))
    if name == "elastic":
        return ElasticRule(transport, arena, rule_args_of(config))
    if name == "gossip":
        return GossipRule(transport, arena, rule_args_of(config), config.seed)
    return WeightsRule(transport, arena)
