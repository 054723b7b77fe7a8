"""What a rank has, in the caller and in workers alike, and how it performs the steps of a command."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.launch.status import StatusBoard
from lockstep.synk.blocks import Blocks
from lockstep.synk.commands import Meeting, Step

if TYPE_CHECKING:
    from lockstep.comm.group import Group
    from lockstep.synk.gpu import Gpu
    from lockstep.synk.programs import Program
    from lockstep.synk.shareds import Shared


class Here:
    """One rank's blocks, shared variables and programs, each by its number."""

    def __init__(self, rank: int, size: int, caller: int, board: StatusBoard | None = None) -> None:
        self.rank, self.size, self.caller = rank, size, caller
        self.blocks = Blocks()
        self.shareds: dict[int, Shared] = {}
        self.programs: dict[int, Program] = {}
        self._board = board
        self.group: Group | None = None  # pipes to all other ranks, where ranks are on GPUs
        self.gpu: Gpu | None = None

    @property
    def is_caller(self) -> bool:
        return self.rank == self.caller

    def say(self, text: str) -> None:
        """What this rank is doing now, for whoever finds it dead."""
        if self._board is not None:
            self._board.say(text)


def perform(here: Here, steps: tuple[Step, ...]) -> Generator[Meeting, Any, list[Any]]:
    """Performs the steps one after another; returns their values. See commands.Step for what it yields.

    A step may read what other ranks have written in the one before: they meet in between.
    """
    values = []
    for number, step in enumerate(steps):
        if number and steps[number - 1].writes_to_others:
            yield nothing_to_decide, None
        values.append((yield from step.run(here)))
    return values


def nothing_to_decide(team: Any, words: list[Any]) -> None:
    """All have arrived, which is all that this meeting is for."""


@dataclass
class Turn:
    """Where this process's own part of a command is: at a meeting, at its end, or at an error."""

    decide: Any = None
    word: Any = None
    values: list[Any] | None = None
    error: BaseException | None = None


def advance(own: Any, decision: Any) -> Turn:
    """Goes on with what `perform` gave, after a meeting that decided this; None begins."""
    try:
        decide, word = own.send(decision)
    except StopIteration as stop:
        return Turn(values=stop.value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Turn(error=error)
    return Turn(decide, word)
