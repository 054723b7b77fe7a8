"""Where a run begins: from scratch, from a checkpoint of its own, or from weights trained elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lockstep.errors import UserError
from lockstep.network.program import Program
from lockstep.pretrained.weights import start_with
from lockstep.runs.folder import read_state
from lockstep.runs.plan import Plan


@dataclass
class Beginning:
    """epoch, position: of the first sample. val_record: of the epochs before. notice: for people.
    of_rule: what a checkpoint holds of the rule that it was made with.
    """

    epoch: int = 1
    position: int = 0
    val_record: list[dict[str, float]] = field(default_factory=list)
    notice: str = ""
    of_rule: dict[str, torch.Tensor] = field(default_factory=dict)


def begin(plan: Plan, program: Program, say: Callable[[str], object]) -> Beginning:
    """Loads what the plan says into the program. Raises UserError where that can't be."""
    if plan.start:
        say(f"loading {plan.start}")
        of_rule = program.load(plan.start)
        return replace(_going_on(plan.start), of_rule=of_rule)
    if plan.config.pretrained:
        say(f"loading {plan.config.pretrained}")
        return _with_pretrained(plan, program)
    return Beginning()


def _going_on(tensors: Path) -> Beginning:
    state = read_state(tensors.with_suffix(".json"))
    record = list(state.val_record)
    if len(record) == state.epoch:  # validated, so that epoch is complete
        return Beginning(state.epoch + 1, 0, record)
    return Beginning(state.epoch, state.position, record)


def _with_pretrained(plan: Plan, program: Program) -> Beginning:
    found = start_with(plan.config, program.model, program.arena)
    record = list(found.record)
    if len(record) >= plan.config.n_epochs:
        text = f"all {plan.config.n_epochs} epochs are done; raise n_epochs to go on"
        raise UserError(f"{found.source}: {text}")
    since = f", going on after epoch {len(record)}" if record else ""
    notice = "\n  ".join([f"starting with {found.source}{since}", *found.notes])
    return Beginning(len(record) + 1, 0, record, notice)
