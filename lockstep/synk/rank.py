"""A worker: python -m lockstep.synk.rank DESCRIPTOR, started by lockstep/synk/workers.py.

It does what the caller says until the pipe ends. An error in a command goes to the caller, and the loop goes
on.
"""

import cProfile
import importlib
import os
import pickle
import signal
import sys
import traceback
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from lockstep.comm.group import Group, World
from lockstep.comm.pipes import Pipe
from lockstep.errors import PeerLost
from lockstep.interrupts import die_with_parent
from lockstep.launch.status import StatusBoard
from lockstep.memory.host import HostMemory
from lockstep.memory.malloc import keep_small_freed_memory
from lockstep.synk.commands import (
    Abort,
    Answer,
    Arrived,
    Close,
    Connect,
    Drop,
    Go,
    NeedRoom,
    Open,
    Preload,
    Problem,
    Ready,
    Run,
    Start,
)
from lockstep.synk.here import Here, perform
from lockstep.synk.results import RankPart, pack

_FOR_EVER = 1e9  # seconds: a worker's end is its caller's


def main(descriptor: int) -> None:
    """What the process does."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means
    pipe = Pipe(Connection(descriptor), "the caller", _FOR_EVER)
    start = pipe.receive(Start, "to be told who it is")
    die_with_parent()
    if os.getppid() != start.pid:  # it died before the line above
        return
    _see_as_caller_sees(start)
    keep_small_freed_memory()
    board = StatusBoard.create()
    board.say("idle")
    pipe.send(Ready())
    board.send(pipe)
    _preload(start.preload)
    profile = cProfile.Profile() if start.profile else None
    with suppress(PeerLost), profile or nullcontext():
        _Loop(pipe, Here(start.rank, start.size, start.caller, board)).serve()
    if profile:
        profile.dump_stats(f"synk_worker_{start.rank}.prof")


def _preload(names: list[str]) -> None:
    with suppress(ImportError):  # whoever needs it will say so
        for name in names:
            importlib.import_module(name)


def _see_as_caller_sees(start: Start) -> None:
    sys.path[:] = start.path
    if start.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.python_path


class _Aborted(Exception):
    """Another rank has a problem."""


class _Loop:
    """Serves the caller's commands."""

    def __init__(self, pipe: Pipe, here: Here) -> None:
        self._pipe, self._here = pipe, here
        self._room = -1  # the block for results

    def serve(self) -> None:
        while True:
            message = self._next()
            if isinstance(message, Close):
                return
            assert isinstance(message, Run), f"{message!r} between two commands"
            self._here.say(message.what)
            answer = self._try(message)
            self._here.say(f"idle after {message.what}")
            if answer is not None:
                self._pipe.send(answer)

    def _next(self) -> Any:
        """The next message that is about a command; blocks are taken and dropped on the way."""
        while True:
            message = self._pipe.receive(object, "a command")
            if isinstance(message, Open):
                self._open(message)
            elif isinstance(message, Connect):
                self._connect(message)
            elif isinstance(message, Preload):
                _preload(message.names)
            elif isinstance(message, Drop):
                for number in message.numbers:
                    self._here.blocks.drop(number)
            else:
                return message

    def _connect(self, message: Connect) -> None:
        others = [rank for rank in range(self._here.size) if rank != self._here.rank]
        ends = {
            other: Connection(self._pipe.receive_descriptor(f"a pipe to rank {other}")) for other in others
        }
        world = World.on_one_host(self._here.size)[self._here.rank]
        self._here.group = Group.connected(world, ends, message.deadline)

    def _open(self, message: Open) -> None:
        try:
            block = HostMemory().receive(self._pipe, message.what)
        except OSError as error:  # no room for one more descriptor or mapping
            error.add_note(f"opening {message.what}")
            self._here.blocks.add_failure(message.number, error)
        else:
            self._here.blocks.add(message.number, block)

    def _try(self, command: Run) -> Answer | Problem | None:
        try:
            values = self._perform(command)
            return Answer([self._pack(value) for value in values])
        except _Aborted:
            return None
        except PeerLost:
            raise
        except BaseException as error:  # SystemExit in a user's function too
            return Problem(_pickled(error), traceback.format_exc())

    def _perform(self, command: Run) -> list[Any]:
        own = perform(self._here, command.steps)
        decision = None
        while True:
            try:
                _, word = own.send(decision)
            except StopIteration as stop:
                values: list[Any] = stop.value
                return values
            self._pipe.send(Arrived(word))
            message = self._next()
            if isinstance(message, Abort):
                own.close()
                raise _Aborted
            assert isinstance(message, Go), f"{message!r} in a meeting"
            decision = message.decision

    def _pack(self, value: Any) -> Any:
        return pack(value, self._get_room) if isinstance(value, RankPart) else value

    def _get_room(self, n_bytes: int) -> tuple[int, Any]:
        """The number of the block for results, and its bytes: at least so many."""
        if self._room < 0 or self._here.blocks[self._room].n_bytes < n_bytes:
            self._pipe.send(NeedRoom(n_bytes))
            message = self._pipe.receive(Open, "room for its results")
            self._open(message)
            self._room = message.number
        block = self._here.blocks[self._room]
        return self._room, block.array("u1", (block.n_bytes,))


def _pickled(error: BaseException) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # some exceptions can't be made again from what they keep
        pickled = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(
        0
    )  # taking down an interpreter that has torch in it takes seconds, and nothing is left to be done
