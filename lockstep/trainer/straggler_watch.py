"""The search for a straggler during training: all trainers' times, gathered at lines of progress."""

from dataclasses import replace

import numpy as np

from lockstep.comm.messages import EpochTimes, Straggler
from lockstep.network.recorder import Recorder
from lockstep.runs.stragglers import PHASES, added, measure, straggler_of
from lockstep.trainer.coordinator import Coordinator

_N_STEPS = 20  # at least so many newest steps decide, if lines of progress are closer


class StragglerWatch:
    """All trainers' times of each step, and the trainer for which the others wait.

    It needs no message in a step: the stopwatch keeps the times until they are gathered.

    Args:
        coordinator: All trainers.
        recorder: Of this trainer.
    """

    def __init__(self, coordinator: Coordinator, recorder: Recorder) -> None:
        self._coordinator, self._recorder = coordinator, recorder
        self._of_epoch: list[EpochTimes] = []
        self._newest: list[EpochTimes] = []
        self._named: Straggler | None = None
        self._found: int | None = None  # the straggler's rank at the last call

    def gather(self, point: str) -> Straggler | None:
        """Gather the times since the last call. Return the straggler of the newest steps, or None.

        All trainers call it after the same step. A trainer is named, by the first trainer of each host, if
        it is the straggler at two calls in a row.

        Raises:
            PeerProblem: A trainer did not arrive in time; the message names it.
        """
        steps, world = self._recorder.stopwatch.take_steps(), self._coordinator.world
        if world.size == 1 or not steps:
            return self._named
        row = [step[phase] for step in steps for phase in PHASES]
        rows = self._coordinator.rows(f"{point}: times of steps", row)
        if world.local_rank == 0:  # the others report nothing
            times = np.array(rows).reshape(world.size, len(steps), len(PHASES))
            self._count(measure(times, world.n_hosts))
        return self._named

    def _count(self, measured: EpochTimes) -> None:
        self._of_epoch = [added([*self._of_epoch, measured])]
        self._newest.append(measured)
        while sum(each.n_steps for each in self._newest[1:]) >= _N_STEPS:
            del self._newest[0]
        found = straggler_of(added(self._newest), self._named)
        self._named = found if found and found.rank == self._found else None
        self._found = found.rank if found else None

    def end_epoch(self, epoch: int) -> EpochTimes | None:
        """Gather the rest of an epoch. Return the sums of the epoch; None if nothing was measured."""
        self.gather(f"the end of epoch {epoch}")
        times, self._of_epoch = self._of_epoch, []
        return replace(times[0], epoch=epoch) if times else None
