"""Makes the rule that a configuration names."""

from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
from lockstep.network.program import Program
from lockstep.sync import Rule
from lockstep.sync.gradients import Gradients
from lockstep.sync.weights import Weights


def make_rule(config: Config, program: Program, transport: Transport, memory: Memory) -> Rule:
    """All ranks call it at once, when the program has the state that it begins with.

    transport: over the arenas of all trainers. memory: for blocks of the rule's own.
    """
    if rule_of(config) == "gradients":
        return Gradients(transport, program, memory)
    return Weights(transport, program.arena)
