"""The messages between the caller and its workers.

One call, in time (two ranks; the caller is rank 0):

    caller    Open ... RunCommand ---- own part ---- | collects | reduces, returns
    worker    ............ RunCommand ---- own part ---- CommandResult

Open (a block's number, then its descriptor) goes to a worker once, when a command first needs the block. A
worker whose results exceed its block sends NeedRoom before its CommandResult, and receives a larger block by
Open.

A command of several steps, or a collective, has barriers at which all ranks wait for each other:

    caller    RunCommand -- step -- | collects, decides ------ Go | -- step -- | collects
    worker    RunCommand -- step -- BarrierReached ........... Go | -- step -- CommandResult

In every round each worker sends exactly one of BarrierReached, CommandResult and CommandError (and NeedRoom
before it). If a rank sends a CommandError, the ranks at the barrier receive Abort, and all are ready for the
next command. Workers wait without a timeout, because the end of the caller ends their pipe and their process.
The caller waits with a timeout.
"""

import io
import pickle
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.synk.context import CommandStep


@dataclass(frozen=True)
class Start:
    """The first message to a worker: its rank, and the caller's module path."""

    rank: int
    size: int
    caller: int  # its rank
    pid: int  # the caller's
    path: list[str]
    python_path: str | None  # $PYTHONPATH as the caller has it
    preload: list[str]  # modules to be imported before they are needed
    profile: bool


@dataclass(frozen=True)
class WorkerReady:
    """The first message of a worker; its status board follows."""


@dataclass(frozen=True)
class Open:
    """The announcement of a block's descriptor, which follows. `what` names the block in errors."""

    number: int
    what: str


@dataclass(frozen=True)
class Connect:
    """The announcement of pipes to all other ranks: descriptors follow, in rank order.

    Attributes:
        deadline: Timeout of a wait at such a pipe, in seconds.
    """

    deadline: float


@dataclass(frozen=True)
class Preload:
    """A request to import modules before they are needed."""

    names: list[str]


@dataclass(frozen=True)
class Drop:
    """A request to close blocks."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class RunCommand:
    """A request to perform steps."""

    what: str
    steps: tuple[CommandStep, ...]


@dataclass(frozen=True)
class Close:
    """A request to exit."""


@dataclass(frozen=True)
class Go:
    """The decision at a barrier that all ranks reached."""

    decision: Any


@dataclass(frozen=True)
class Abort:
    """A request to abandon the command, because another rank failed."""


@dataclass(frozen=True)
class BarrierReached:
    """A worker's contribution at a barrier."""

    contribution: Any


@dataclass(frozen=True)
class NeedRoom:
    """A worker's request for a larger block for its results."""

    n_bytes: int


@dataclass(frozen=True)
class CommandResult:
    """A worker's results of a command, one value per step."""

    values: list[Any]


@dataclass(frozen=True)
class CommandError:
    """A worker's error: the exception as pickled by cloudpickle, and the text of its traceback.

    Attributes:
        failed_blocks: Blocks that the worker could not open, which commands that need them send again.
    """

    error: bytes
    traceback: str
    failed_blocks: tuple[int, ...] = ()


class _ErrorUnpickler(pickle.Unpickler):
    """An unpickler that leaves the program's classes in this process as they are.

    cloudpickle pickles such a class with its attributes, and sets them on the class of this process, too.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(_set_missing, found) if name == "_class_setstate" else found


def _set_missing(set_state: Any, cls: type, state: tuple[dict[str, Any], Any]) -> Any:
    """Set the attributes that a class lacks; all of a new class, which does not have its module yet."""
    attributes, slots = state
    if cls.__module__ == attributes.get("__module__"):
        attributes = {name: value for name, value in attributes.items() if name not in vars(cls)}
    return set_state(cls, (attributes, slots))


def unpickle_error(pickled: bytes) -> Any:
    """Return the exception of a CommandError."""
    return _ErrorUnpickler(io.BytesIO(pickled)).load()


Message = BarrierReached | NeedRoom | CommandResult | CommandError
