"""Makes the rule that a configuration names."""

import torch

from lockstep.config import Config
from lockstep.config.rules import rule_args_of, rule_of
from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
from lockstep.network.program import Program
from lockstep.sync import Rule
from lockstep.sync.elastic import Elastic
from lockstep.sync.gossip import Gossip
from lockstep.sync.gradients import Gradients
from lockstep.sync.local import Local
from lockstep.sync.outer import Outer
from lockstep.sync.weights import Weights


def make_rule(
    config: Config, program: Program, transport: Transport, memory: Memory, kept: dict[str, torch.Tensor]
) -> Rule:
    """All ranks call it at once, when the program has the state that it begins with.

    transport: over the arenas of all trainers. memory: for blocks of the rule's own. kept: what the
    checkpoint that the run goes on from holds of its rule, which may be another one.
    """
    rule = _make(config, program, transport, memory)
    rule.load(kept)
    return rule


def _make(config: Config, program: Program, transport: Transport, memory: Memory) -> Rule:
    name, arena = rule_of(config), program.arena
    if name == "gradients":
        return Gradients(config, transport, program, memory)
    if name == "local":
        return Local(transport, arena, rule_args_of(config))
    if name == "outer":
        return Outer(transport, arena, rule_args_of(config))
    if name == "elastic":
        return Elastic(transport, arena, rule_args_of(config), memory)
    if name == "gossip":
        return Gossip(transport, arena, rule_args_of(config), memory, config.seed)
    return Weights(transport, arena)
