"""A saver that sends digests of the states that a replay computes, and writes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.group import World
from lockstep.comm.messages import Order
from lockstep.data.dataset import Dataset
from lockstep.data.sampling import steps_done
from lockstep.loading.orders import Orders
from lockstep.network.program import Program
from lockstep.runs import checkpoint
from lockstep.runs.plan import RunPlan
from lockstep.trainer.progress import ProgressReporter
from lockstep.trainer.receipts import machine_of, versions_of_computing
from lockstep.trainer.saving import Saver


@dataclass(frozen=True)
class ReplayBegun:
    """The first message of trainer 0: the versions and machine that compute the states."""

    versions: dict[str, str]
    machine: dict[str, str]


@dataclass(frozen=True)
class ReplayedState:
    """A message of trainer 0: the SHA-256 of the state after a step of the run."""

    step: int
    state: str


class StateSender(Saver):
    """A saver that sends the digest of each state that has a receipt.

    Args:
        plan, program, reporter, dataset, world: As of Saver; `plan.writes` must be False.
        orders: They number the steps.
        steps: The steps of the whole run whose states are sent.
    """

    def __init__(
        self,
        plan: RunPlan,
        program: Program,
        reporter: ProgressReporter,
        dataset: Dataset,
        *,
        world: World,
        orders: Orders,
        steps: Sequence[int],
    ) -> None:
        assert not plan.writes, "a replay writes nothing"
        super().__init__(plan, program, reporter, dataset, world=world)
        self._orders, self._steps = orders, set(steps)

    @property
    def is_done(self) -> bool:
        """True if all states have been sent. It is the same in all trainers."""
        return not self._steps

    def begin_receipts(self, save: Callable[[bool, bool], None]) -> None:
        self._reporter.send(ReplayBegun(versions_of_computing(), machine_of(self._config)))
        save(False, True)

    def is_receipt_due(self, order: Order, n_steps: int) -> bool:
        return self._step_at(order.epoch, order.stop) in self._steps

    def save(
        self,
        epoch: int,
        position: int,
        val_record: list[dict[str, float]],
        rule_state: dict[str, torch.Tensor],
        to_disk: bool = True,
        receipt: bool = False,
    ) -> None:
        """Send the digest of the state if it is due, and write nothing."""
        step = self._step_at(epoch, position)
        if step not in self._steps:
            return
        self._steps.remove(step)
        if self._world.rank == 0:
            arena = self._program.arena
            tensors = {**rule_state, **arena.outside(), **arena.views_of_all(arena.flat)}
            self._reporter.send(ReplayedState(step, checkpoint.digest_of(tensors)))

    def _step_at(self, epoch: int, position: int) -> int:
        return steps_done(epoch, position, self._orders.n_images("train"), self._orders.step_size("train"))
