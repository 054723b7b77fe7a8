"""The initial state of a run: from scratch, from its own checkpoint, or from pretrained weights."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from lockstep.config import Config
from lockstep.config.tasks import monitor_of
from lockstep.errors import UserError
from lockstep.network.program import Program
from lockstep.pretrained.weights import start_with
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint_files import read_state
from lockstep.runs.metrics import has_ended
from lockstep.runs.plan import RunPlan
from lockstep.runs.state import State


@dataclass
class InitialState:
    """The point at which a run starts or resumes.

    Attributes:
        epoch: The epoch of the first sample.
        position: The number of samples of that epoch that are already done.
        val_record: The validation results of the epochs before.
        of_rule: The rule's tensors in the checkpoint.
        has_ended: Whether `patience` has ended the run there, so that no epoch is left.
    """

    epoch: int = 1
    position: int = 0
    val_record: list[dict[str, float]] = field(default_factory=list)
    of_rule: dict[str, torch.Tensor] = field(default_factory=dict)
    has_ended: bool = False


def begin(plan: RunPlan, program: Program, say: Callable[[str], object]) -> InitialState:
    """Load a checkpoint or pretrained weights into the program, and say which weights.

    Args:
        plan: The run's plan.
        program: The trainer's network and optimizer, which are overwritten. Its `warn` gets a line about
            pretrained weights.
        say: Gets the present phase.

    Raises:
        UserError: The file can't be read or does not fit.
    """
    if plan.retained:
        say("loading the memory checkpoint")
        of_rule = program.load(plan.retained.tensors(), "the memory checkpoint")
        return replace(_resumed(plan.retained.state(), plan.config), of_rule=of_rule)
    if plan.start:
        say(f"loading {plan.start}")
        of_rule = program.load(checkpoint.load(plan.start), str(plan.start))
        state = read_state(plan.start.with_suffix(".json"))
        return replace(_resumed(state, plan.config), of_rule=of_rule)
    if plan.config.pretrained:
        say(f"loading {plan.config.pretrained}")
        return _with_pretrained(plan, program)
    return InitialState()


def _resumed(state: State, config: Config) -> InitialState:
    record = list(state.val_record)
    ended = state.is_complete and has_ended(record, monitor_of(config), config.patience)
    if state.is_complete and not ended:
        return InitialState(state.epoch + 1, 0, record)
    return InitialState(state.epoch, state.position, record, has_ended=ended)


def _with_pretrained(plan: RunPlan, program: Program) -> InitialState:
    loaded = start_with(plan.config, program.model, program.arena)
    record = list(loaded.record)
    epoch = int(record[-1]["epoch"]) if record else 0
    if epoch >= plan.config.n_epochs:
        text = f"all {plan.config.n_epochs} epochs are done; raise n_epochs to continue"
        raise UserError(f"{loaded.source}: {text}")
    since = f", continuing after epoch {epoch}" if record else ""
    program.warn("\n  ".join([f"starting with {loaded.source}{since}", *loaded.notes]))
    return InitialState(epoch + 1, 0, record, loaded.of_rule)
