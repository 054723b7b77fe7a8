"""The state of one rank, in the caller and in workers alike, and how a rank performs a command's steps."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.synk.blocks import BlockTable
from lockstep.synk.interrupts import interruptible
from lockstep.synk.programs import RankProgram
from lockstep.synk.settings import Settings
from lockstep.synk.shareds import Shared

if TYPE_CHECKING:
    from lockstep.synk.gpu import RankGpu  # torch and PyCUDA come with it


class _Process:
    worker: int | None = None  # process id


def mark_worker() -> None:
    """Record that this process is a worker; a child that it forks is none."""
    _Process.worker = os.getpid()


def is_worker() -> bool:
    """Return whether this process is a worker."""
    return _Process.worker == os.getpid()


class RankContext:
    """One rank's blocks, shared variables and programs, each by number."""

    def __init__(self, rank: int, size: int, caller: int) -> None:
        self.rank, self.size, self.caller = rank, size, caller
        self.blocks = BlockTable()
        self.shareds: dict[int, Shared] = {}
        self.programs: dict[int, RankProgram] = {}
        self.settings = Settings()
        self.group: Group | None = None  # pipes to all other ranks, where ranks are on GPUs
        self.gpu: RankGpu | None = None

    @property
    def is_caller(self) -> bool:
        """True in the process that makes the calls, false in a worker."""
        return self.rank == self.caller


# The caller's decision function, called with its team and all contributions in rank order; and this rank's
# contribution.
Barrier = tuple[Callable[[Any, list[Any]], Any], Any]


class CommandStep(ABC):
    """A part of a command, performed by all ranks.

    Attributes:
        writes_to_others: The step writes into memory that other ranks read.
    """

    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        """Return the numbers of the blocks that a rank needs for the step."""
        return ()

    @abstractmethod
    def run(self, context: RankContext) -> Any:
        """Return the result for the caller.

        A step that needs barriers is a generator: it yields a Barrier, receives the decision, and returns its
        result at the end.
        """


class _StepStopped(Exception):
    """A step raised StopIteration, which no generator can raise."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


def perform(context: RankContext, steps: tuple[CommandStep, ...]) -> Generator[Barrier, Any, list[Any]]:
    """Perform the steps one after another; return their values. Yields the barriers of the steps.

    A barrier separates a step that writes into other ranks' memory from the next one, which may read it.
    """
    values = []
    for number, step in enumerate(steps):
        if number and steps[number - 1].writes_to_others:
            yield no_decision, None
        try:
            result = step.run(context)
        except StopIteration as error:  # which Python would make a RuntimeError here, in a generator
            raise _StepStopped(error) from None
        values.append((yield from result) if inspect.isgenerator(result) else result)
    return values


def no_decision(team: Any, contributions: list[Any]) -> None:
    """Decide nothing: the barrier only makes the ranks wait for each other."""


@dataclass
class CommandState:
    """The state of a rank's part of a command: at a barrier, at its end, or at an error."""

    decide: Any = None
    contribution: Any = None
    values: list[Any] | None = None
    error: BaseException | None = None


def advance(own: Any, decision: Any) -> CommandState:
    """Resume the generator of `perform` with a barrier's decision, or start it with None."""
    try:
        decide, contribution = interruptible(lambda: own.send(decision))
    except StopIteration as stop:
        return CommandState(values=stop.value)
    except _StepStopped as stopped:
        return CommandState(error=stopped.error)
    except BaseException as error:  # KeyboardInterrupt too: the other ranks' answers are to be collected
        return CommandState(error=error)
    return CommandState(decide, contribution)


@dataclass(frozen=True)
class TakeGpus(CommandStep):
    """Step: every rank takes its device. `devices` is by rank."""

    devices: tuple[str, ...]

    def run(self, context: RankContext) -> None:
        from lockstep.kernels.fold import MOST_RANKS
        from lockstep.synk.gpu import RankGpu

        if context.size > MOST_RANKS:
            raise UserError(f"fork(): at most {MOST_RANKS} ranks can be on GPUs, not {context.size}")
        assert context.group is not None
        context.gpu = RankGpu(self.devices[context.rank], context.group)


@dataclass(frozen=True)
class ReleaseGpus(CommandStep):
    """Step: all ranks free their memory on GPUs. It is the team's last command."""

    def run(self, context: RankContext) -> None:
        assert context.group is not None
        try:
            self._release(context)
        except BaseException:
            for pipe in context.group.pipes.values():  # the other ranks would wait for this one at a barrier
                pipe.close()
            raise

    def _release(self, context: RankContext) -> None:
        shareds = [shared for _, shared in sorted(context.shareds.items())]
        for shared in shareds:  # all of them before the first barrier
            shared.leave_gpu()
        for shared in shareds:
            shared.release_gpu()
        if context.gpu is not None:
            context.gpu.close()
