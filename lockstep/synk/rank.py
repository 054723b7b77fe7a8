"""The program of a worker: python -m lockstep.synk.rank DESCRIPTOR, started by lockstep/synk/workers.py.

A worker performs the caller's commands until the pipe closes. It reports an error to the caller and then
serves the next command.
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
from lockstep.launch.status import StatusBoard
from lockstep.memory.host import HostMemory
from lockstep.memory.malloc import keep_small_freed_memory
from lockstep.signals import die_with_parent
from lockstep.synk.commands import (
    Abort,
    BarrierReached,
    Close,
    CommandError,
    CommandResult,
    Connect,
    Drop,
    Go,
    NeedRoom,
    Open,
    Preload,
    RunCommand,
    Start,
    WorkerReady,
    unpickle_error,
)
from lockstep.synk.context import RankContext, advance, mark_worker, perform
from lockstep.synk.results import RankPart, pack

_FOR_EVER = 1e9  # seconds: a worker waits as long as its caller lives


def main(descriptor: int) -> None:
    """Run the worker on an inherited descriptor, until the caller ends it or exits."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means
    pipe = Pipe(Connection(descriptor), "the caller", _FOR_EVER)
    mark_worker()
    os.register_at_fork(after_in_child=pipe.close)  # a callable's child would hold it open, or answer, too
    with suppress(PeerLost):
        start = pipe.receive(Start, "its rank")
        die_with_parent()
        if os.getppid() == start.pid:  # else the caller died before the line above
            _run(pipe, start)


def _run(pipe: Pipe, start: Start) -> None:
    """Report that this worker is ready, and serve the caller's commands."""
    _use_paths_of_caller(start)
    keep_small_freed_memory()
    board = StatusBoard.create()
    board.say("idle")
    pipe.send(WorkerReady())
    board.send(pipe)
    _preload(start.preload)
    profile = cProfile.Profile() if start.profile else None
    try:
        with profile or nullcontext():
            _Loop(pipe, RankContext(start.rank, start.size, start.caller), board).serve()
    finally:
        if profile:
            _write_profile(profile, f"synk_worker_{start.rank}.prof")


def _write_profile(profile: cProfile.Profile, path: str) -> None:
    try:
        profile.dump_stats(path)
    except OSError as error:
        print(f"lockstep.synk: the profile was not written: {error}", file=sys.stderr)


def _preload(names: list[str]) -> None:
    with suppress(Exception):  # the function that needs the module will report it
        for name in names:
            importlib.import_module(name)


def _use_paths_of_caller(start: Start) -> None:
    sys.path[:] = start.path
    if start.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.python_path


class _Aborted(Exception):
    """Another rank failed, and the command is abandoned."""


class _Loop:
    """The loop that serves the caller's commands, and says on the board which one it performs."""

    def __init__(self, pipe: Pipe, context: RankContext, board: StatusBoard) -> None:
        self._pipe, self._context, self._board, self._pid = pipe, context, board, os.getpid()
        self._room = -1  # the block for results

    def serve(self) -> None:
        while True:
            message = self._next()
            if isinstance(message, Close):
                return
            assert isinstance(message, RunCommand), f"{message!r} between two commands"
            self._board.say(message.what)
            answer = self._try(message)
            if os.getpid() != self._pid:
                raise RuntimeError("a child that a callable forked returned from it. End it by os._exit()")
            self._board.say(f"idle after {message.what}")
            if answer is not None:
                self._pipe.send(answer)

    def _next(self) -> Any:
        """Return the next message about a command, after handling messages about blocks and modules."""
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
                    self._context.blocks.drop(number)
            else:
                return message

    def _connect(self, message: Connect) -> None:
        others = [rank for rank in range(self._context.size) if rank != self._context.rank]
        ends = {
            other: Connection(self._pipe.receive_descriptor(f"a pipe to rank {other}")) for other in others
        }
        world = World.on_one_host(self._context.size)[self._context.rank]
        self._context.group = Group.connected(world, ends, message.deadline)

    def _open(self, message: Open) -> None:
        try:
            block = HostMemory().receive(self._pipe, message.what)
        except OSError as error:  # no room for one more descriptor or mapping
            error.add_note(f"opening {message.what}")
            self._context.blocks.add_failure(message.number, error)
        else:
            self._context.blocks.add(message.number, block)

    def _try(self, command: RunCommand) -> CommandResult | CommandError | None:
        try:
            values = self._perform(command)
            return CommandResult([self._pack(value) for value in values])
        except _Aborted:
            return None
        except BaseException as error:  # SystemExit in a user's function too
            if isinstance(error, PeerLost) and error.peer == self._pipe.peer:
                raise  # the caller has exited
            return CommandError(_pickled(error), _traceback_of(error), self._context.blocks.failed)

    def _perform(self, command: RunCommand) -> list[Any]:
        own = perform(self._context, command.steps)
        decision = None
        while True:
            state = advance(own, decision)
            if state.error is not None:
                raise state.error
            if state.values is not None:
                return state.values
            self._pipe.send(BarrierReached(state.contribution))
            message = self._next()
            if isinstance(message, Abort):
                own.close()
                raise _Aborted
            assert isinstance(message, Go), f"{message!r} at a barrier"
            decision = message.decision

    def _pack(self, value: Any) -> Any:
        return pack(value, self._get_room) if isinstance(value, RankPart) else value

    def _get_room(self, n_bytes: int) -> tuple[int, Any]:
        """Return the number and the bytes of the block for results, of at least this size."""
        if self._room < 0 or self._context.blocks[self._room].n_bytes < n_bytes:
            self._pipe.send(NeedRoom(n_bytes))
            message = self._pipe.receive(object, "room for its results")
            if isinstance(message, Abort):
                raise _Aborted
            assert isinstance(message, Open), f"{message!r} where room is due"
            self._open(message)
            is_open = message.number not in self._context.blocks.failed
            self._room = message.number if is_open else -1  # the next call asks for another
            block = self._context.blocks[message.number]
        else:
            block = self._context.blocks[self._room]
        return self._room, block.array("u1", (block.n_bytes,))


def _pickled(error: BaseException) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        unpickle_error(pickled)
    except BaseException:  # some exceptions cannot be rebuilt from their arguments
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {_text_of(error)}"))
    return pickled


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # whatever a user's __str__ raises
        return f"its text can't be had, __str__ raised {type(second).__name__}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # whatever an attribute of a user's exception raises
        return "".join(traceback.format_tb(error.__traceback__))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    with suppress(Exception):  # a program that was started without standard streams has none
        sys.stdout.flush()
    os._exit(0)  # finalizing an interpreter with torch takes seconds, and no work is left
