"""Opens what a trainer exchanges with: the transport over all arenas, and the rule: what, and when."""

from collections.abc import Callable

import torch

from lockstep.backends import Backend
from lockstep.comm.group import Group
from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.exchange.transport import Transport
from lockstep.hosts.everyone import Everyone
from lockstep.network.program import Program
from lockstep.sync import Rule
from lockstep.sync.agreement import check_replicas
from lockstep.sync.making import make_rule


def open_exchange(
    config: Config,
    backend: Backend,
    program: Program,
    group: Group,
    clock: Callable[[str], None],
    kept: dict[str, torch.Tensor],
    everyone: Everyone,
) -> tuple[Transport, Rule, str]:
    """All trainers call it at once. Returns also a line on why it is this transport, or ''.

    clock: told when a phase of an exchange begins. kept: what the checkpoint to go on from holds of a rule.
    everyone: also the trainers of other hosts. Raises UserError where that exchange can't be had.
    """
    arena = program.arena
    transport, reason = backend.open_transport(config.exchange, arena.block, arena.flat, group)
    transport = everyone.over_hosts(transport, arena.flat)
    alone = everyone.world.size == 1
    way = "nobody to average with" if alone else f"{transport.name}, rule: {rule_of(config)}"
    program.ways = {**program.ways, "average": way}
    if not alone:  # else nobody is met, and an event for each phase would cost time for nothing
        transport.clock = clock
    check_replicas(group, arena, "the start", everyone.alike)
    rule = make_rule(config, program, transport, backend.memory, kept)
    if config.sync_batch_norm and group.pipes:  # a lone trainer has all pictures
        program.share_statistics(transport, backend.memory, clock)
    return transport, rule, f"exchange: {transport.name}: {reason}" if reason else ""
