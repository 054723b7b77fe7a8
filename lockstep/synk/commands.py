"""The messages between the caller and its workers.

One call, in time (two ranks; the caller is rank 0):

    caller    Open ... Run ---- own part ---- | collects | folds, returns
    worker    ............ Run ---- own part ---- Answer

Open (a block's number, then its descriptor) goes to a worker once, when a command first needs the block. A
worker whose results find no room in its block sends NeedRoom before its Answer, and gets a larger one by
Open.

A command of several steps, or a collective, has meetings in which all ranks wait for each other:

    caller    Run -- step -- | collects, decides -- Go | -- step -- | collects
    worker    Run -- step -- Arrived ............... Go | -- step -- Answer

In every round each worker sends just one of Arrived, Answer, Problem (and NeedRoom before). When a rank has a
Problem, those that have arrived get Abort, and all are ready for the next command. Workers wait without a
deadline: the end of the pipe, and of their process, is the caller's end. The caller's waits have deadlines.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from lockstep.synk.here import Here

# How the caller decides, given its team and all ranks' words in rank order; and this rank's word.
Meeting = tuple[Callable[[Any, list[Any]], Any], Any]


class Step(Protocol):
    """A part of a command, performed by all ranks.

    `run` yields a Meeting where it needs one, and gets what was decided. What it returns goes to the caller.
    writes_to_others: whether it writes into memory that other ranks read.
    """

    writes_to_others: ClassVar[bool]

    def blocks(self) -> Iterable[int]:
        """The blocks that a rank needs for it."""

    def run(self, here: "Here") -> Generator[Meeting, Any, Any]: ...


@dataclass(frozen=True)
class Start:
    """To a new worker: who it is, and how the caller finds modules."""

    rank: int
    size: int
    caller: int  # its rank
    pid: int  # the caller's
    path: list[str]
    python_path: str | None  # $PYTHONPATH as the caller has it
    preload: list[str]  # modules to be imported before they are needed
    profile: bool


@dataclass(frozen=True)
class Ready:
    """From a new worker; its status board follows."""


@dataclass(frozen=True)
class Open:
    """A block follows (lockstep/memory). what: names it in errors."""

    number: int
    what: str


@dataclass(frozen=True)
class Connect:
    """Pipes to all other ranks: descriptors follow, in rank order. deadline: seconds of a wait there."""

    deadline: float


@dataclass(frozen=True)
class Preload:
    """Import these modules, which will be needed."""

    names: list[str]


@dataclass(frozen=True)
class Drop:
    """These blocks are not needed any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Perform these steps."""

    what: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Close:
    """Leave."""


@dataclass(frozen=True)
class Go:
    """Everyone has arrived, and this was decided."""

    decision: Any


@dataclass(frozen=True)
class Abort:
    """Another rank has a problem: this command is over."""


@dataclass(frozen=True)
class Arrived:
    """At a meeting."""

    word: Any


@dataclass(frozen=True)
class NeedRoom:
    """The results need a block of so many bytes."""

    n_bytes: int


@dataclass(frozen=True)
class Answer:
    """The command is done; one value for each step."""

    values: list[Any]


@dataclass(frozen=True)
class Problem:
    """The command failed here. error: pickled by cloudpickle; traceback: the text."""

    error: bytes
    traceback: str


Message = Arrived | NeedRoom | Answer | Problem
