"""The team, which is this process and its workers: starts and ends them, and sends them commands."""

import itertools
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from lockstep.comm.group import Group, World
from lockstep.errors import DeadlinePassed, PeerProblem, UserError, warn
from lockstep.memory.host import HostMemory
from lockstep.memory.malloc import keep_small_freed_memory
from lockstep.synk.commands import (
    Abort,
    BarrierReached,
    Close,
    CommandError,
    CommandResult,
    Drop,
    Go,
    Message,
    NeedRoom,
    Open,
    Preload,
    RunCommand,
    unpickle_error,
)
from lockstep.synk.context import (
    CommandState,
    CommandStep,
    RankContext,
    ReleaseGpus,
    TakeGpus,
    advance,
    perform,
)
from lockstep.synk.interrupts import RankLost, defer_signals, raise_second_interrupt
from lockstep.synk.shareds import SharedRegistry
from lockstep.synk.workers import (
    LEAVE_GPU_SECONDS,
    LEAVE_SECONDS,
    ImportHook,
    TeamOptions,
    ThreadLimits,
    Worker,
    connect_ranks,
    end_worker,
    needed_for_graphs,
    send_start,
    start_worker,
    wait_until_ready,
)

ROOM_BYTES = 1 << 20  # smallest block for a worker's results


class _CommandFailed(Exception):
    """An error of a command on some rank; all ranks are ready for the next command."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Team:
    """All ranks of a process, used by one thread at a time."""

    def __init__(self, options: TeamOptions) -> None:
        size, caller = options.size, options.caller
        self.size, self.rank, self.context = size, caller, RankContext(caller, size, caller)
        self.numbers = itertools.count(1)  # of functions, variables and blocks: a thread takes the next
        self.registry = SharedRegistry(self.context.shareds, self.numbers)
        self.distributed = self.closed = False
        self.lock = threading.RLock()  # one thread at a time
        self._pid = os.getpid()
        self._lost: RankLost | None = None
        self._import_hook: ImportHook | None = None
        self._calling: str | None = None  # the public call of this thread, from its first line to its last
        self._busy = False  # a command is under way
        self._unfinished: str | None = None  # the user of the pipes; remains set if it was cut short
        self._released: deque[int] = deque()
        self._names: dict[int, str] = {}  # of blocks
        self.imported: dict[str, Any] = {}  # specs of the modules that ranks import, as they imported them
        self.workers: list[Worker] = []

    def start(self, options: TeamOptions) -> None:
        """Start the workers, and wait until they are ready."""
        keep_small_freed_memory()
        self.threads = ThreadLimits(options.threads)
        try:
            self._start(options)
        except BaseException:
            self.close()
            raise

    def _start(self, options: TeamOptions) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self.workers.append(start_worker(rank, options))
        for worker in self.workers:
            with self._watching(worker):
                send_start(worker, options)
        for worker in self.workers:
            with self._watching(worker):
                wait_until_ready(worker)
        if options.devices:
            self._take_gpus(options)
        elif "pytensor" not in sys.modules:
            self._import_hook = ImportHook(self._preload)

    def _take_gpus(self, options: TeamOptions) -> None:
        """Connect all ranks by pipes, and have each take its GPU."""
        own = connect_ranks(self.workers, self.rank, options.timeout)
        world = World.on_one_host(self.size)[self.rank]
        self.context.group = Group.connected(world, own, options.timeout)
        self.ask("taking its GPU", TakeGpus(options.devices))

    @property
    def is_mine(self) -> bool:
        """True in the process that started the ranks; a forked child only has copies of the pipes."""
        return self._pid == os.getpid()

    def check(self, what: str) -> None:
        """Raise an error that names the call `what` if the ranks cannot be used.

        Raises:
            RuntimeError: This is a forked child, the team is closed, or a command was cut short.
            RankLost: A rank is lost.
        """
        if not self.is_mine:
            raise RuntimeError(
                f"{what}: the ranks belong to process {self._pid}, and this is a child that it forked. Call "
                "it there, or call fork() here for ranks of this process"
            )
        if self.closed:
            raise RuntimeError(f"{what} belongs to a closed team: call fork(), and make it again")
        if self._lost is not None:
            raise RankLost(*self._lost.args)
        if self._unfinished is not None and not self._busy:
            raise RuntimeError(
                f"{what}: an exception cut short {self._unfinished!r}, whose answers are still to come. Call "
                "close(), then fork()"
            )

    @contextmanager
    def exclusive_call(
        self, what: str, on_second_interrupt: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Make the `with` block the only public call: other threads and signal handlers wait for its end.

        Args:
            on_second_interrupt: Called at a second Ctrl-C; by default it kills the workers.

        Raises:
            RuntimeError: This thread is already in a call; for instance, a callable called a function.
        """
        self.check(what)  # before the lock, which a forked child may have inherited as taken
        with defer_signals(on_second_interrupt or self._kill_after_interrupt):
            while not self.lock.acquire(timeout=0.1):  # another thread's call may compute for long
                raise_second_interrupt()
            try:
                with self._noting_call(what):
                    self.check(what)
                    yield
            finally:
                self.lock.release()

    @contextmanager
    def _noting_call(self, what: str) -> Iterator[None]:
        if self._calling is not None:
            raise RuntimeError(
                f"{what} within {self._calling}: the ranks perform one call at a time. Call it before or "
                "after, not in a callable"
            )
        self._calling = what
        try:
            yield
        finally:
            self._calling = None

    def allocate(self, n_bytes: int, what: str) -> int:
        """Allocate a zeroed block of shared memory, of a byte or more, and return its number.

        Raises:
            MemoryError: The host has too little memory.
            OSError: The process has too many open descriptors.
        """
        self.check(what)
        self._flush()
        try:
            block = HostMemory("Use less data or fewer ranks.").allocate(max(1, n_bytes), what)
        except UserError as error:
            raise MemoryError(str(error)) from error
        except OSError as error:
            raise OSError(error.errno, f"{what}: {error.strerror} (for descriptors: ulimit -n)") from error
        number = next(self.numbers)
        self.context.blocks.add(number, block)
        self._names[number] = what
        return number

    def release(self, *numbers: int) -> None:
        """Release blocks in all ranks. Finalizers call it, at any moment and in any thread."""
        self._released.extend(numbers)
        self._flush()

    def ask(self, what: str, *steps: CommandStep, own_first: bool = False) -> list[list[Any]]:
        """Have all ranks perform the steps; return the values by step, then by rank.

        An error of any rank is raised when all ranks are ready again. The caller is inside of
        `exclusive_call`, except for fork() and close().

        Args:
            own_first: Start in this process, and on the workers once it waits at a barrier or is done.
        """
        with self.lock:
            self.check(what)
            if self._busy:
                raise RuntimeError(f"{what}: {self._unfinished!r} is under way. Call it before or after")
            self._busy, self._unfinished = True, what
            by_rank, error = [], None
            try:
                by_rank = self._ask(RunCommand(what, steps), own_first)
                self._unfinished = None
            except _CommandFailed as failed:
                error, self._unfinished = failed.error, None
            finally:
                self._busy = False
                self._flush()
            if error is not None:
                raise error
            return [list(values) for values in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        if self.closed or not self.is_mine:
            return
        with defer_signals(self.kill):
            is_free = self.lock.acquire(timeout=LEAVE_SECONDS)
            if not is_free:  # another thread's call holds the lock; the call ends when the workers do
                self._kill_after_interrupt("was killed by close() in another thread")
                is_free = self.lock.acquire(timeout=LEAVE_SECONDS)
            try:
                if is_free and self._calling is not None:
                    raise RuntimeError(f"close() within {self._calling}. Call it after")
                if not self.closed:
                    self._close()
            finally:
                if is_free:
                    self.lock.release()

    def _close(self) -> None:
        is_idle = self._lost is None and self._unfinished is None
        try:
            if self.context.gpu is not None and is_idle:
                self._leave_gpus()
        finally:
            self._end(is_idle)

    def _end(self, is_idle: bool) -> None:
        """End the workers; idle ones have time to exit."""
        if self.context.gpu is not None:
            self.context.gpu.leave()
        self.closed = True
        if self._import_hook is not None:
            self._import_hook.stop()
        for worker in self.workers:
            with suppress(PeerProblem):
                worker.pipe.send(Close())
        for worker in self.workers:
            end_worker(worker, LEAVE_SECONDS if is_idle else 0)
        self.context.blocks.close()
        self.threads.restore()

    def _preload(self) -> None:
        """Have the workers import modules early, unless a command is under way or this is a forked child."""
        with self._free_pipes() as are_free:
            for worker in self.workers if are_free else []:
                with suppress(PeerProblem):  # the next command reports it
                    worker.pipe.send(Preload(needed_for_graphs()))

    def _leave_gpus(self) -> None:
        """Free all ranks' memory on GPUs. A rank that does not answer is killed, and a warning names it."""
        assert self.context.group is not None
        for pipe in [*self.context.group.pipes.values(), *(worker.pipe for worker in self.workers)]:
            pipe.shorten_deadline(LEAVE_GPU_SECONDS)
        try:
            self.ask("leaving its GPU", ReleaseGpus())
        except RankLost as lost:  # then no rank is left to wait for
            if isinstance(lost.__cause__, DeadlinePassed):
                warn(
                    f"close(): rank {lost.rank} (pid {lost.pid}) {lost.how} at: {lost.doing}. It was killed, "
                    "which frees its memory on the GPU",
                    RuntimeWarning,
                )

    def _ask(self, command: RunCommand, own_first: bool) -> list[list[Any]]:
        own = perform(self.context, command.steps)
        state = self._advance(own, None) if own_first else None
        if state is not None:
            self._check_problems(state, {})
        numbers = {number for step in command.steps for number in step.blocks()}
        for worker in self.workers:
            with self._watching(worker):
                self._send_missing_blocks(worker, numbers)
                worker.pipe.send(command)
        state = state or self._advance(own, None)
        while True:
            messages = {worker.rank: self._collect(worker) for worker in self.workers}
            self._check_problems(state, messages)
            if state.values is not None:
                return self._by_rank(state.values, messages, CommandResult)
            try:
                decision = state.decide(self, self._by_rank(state.contribution, messages, BarrierReached))
            except RankLost:
                raise
            except BaseException as error:
                self._send(Abort())
                raise _CommandFailed(error) from None
            self._send(Go(decision))
            state = self._advance(own, decision)

    def _advance(self, own: Any, decision: Any) -> CommandState:
        """Call `advance`, and check whether a callable forked or another thread closed the team meanwhile."""
        state = advance(own, decision)
        if self.closed or not self.is_mine:
            self.check(f"the rest of {self._calling}")
        return state

    def send_missing_blocks(self, numbers: set[int]) -> None:
        """Send blocks to the workers that lack them: at a barrier, before its decision is sent."""
        for worker in self.workers:
            with self._watching(worker):
                self._send_missing_blocks(worker, numbers)

    def _send_missing_blocks(self, worker: Worker, numbers: set[int]) -> None:
        for number in numbers - worker.open_blocks:
            worker.pipe.send(Open(number, self._names[number]))
            self.context.blocks[number].send(worker.pipe)
            worker.open_blocks.add(number)

    def _send(self, message: Any) -> None:
        for worker in self.workers:
            with self._watching(worker):
                worker.pipe.send(message)

    def _collect(self, worker: Worker) -> Message:
        """Return a worker's message of this round."""
        while True:
            with self._watching(worker):
                message = cast(Message, worker.pipe.receive(object, "its part"))
                if not isinstance(message, NeedRoom):
                    return message
                n_bytes = max(ROOM_BYTES, message.n_bytes * 5 // 4)
                try:
                    number = self.allocate(n_bytes, f"results of rank {worker.rank}")
                except (MemoryError, OSError) as error:
                    worker.pipe.send(Abort())
                    return CommandError(pickle.dumps(error), "no memory for its results")
                if worker.results is not None:
                    self._released.append(worker.results)
                worker.results = number
                self._send_missing_blocks(worker, {number})

    def _check_problems(self, state: CommandState, messages: dict[int, Message]) -> None:
        """Raise this process's own error, else the lowest rank's, after all ranks abandoned the command."""
        problems = {rank: m for rank, m in messages.items() if isinstance(m, CommandError)}
        if state.error is None and not problems:
            return
        for worker in self.workers:
            if worker.rank in problems:
                worker.open_blocks.difference_update(problems[worker.rank].failed_blocks)
            if isinstance(messages.get(worker.rank), BarrierReached):
                with self._watching(worker):
                    worker.pipe.send(Abort())
        error = state.error
        if error is None or (problems and isinstance(error, PeerProblem)):  # a problem of theirs caused it
            rank = min(problems)
            error = _unpickle(problems[rank])
            _add_note(error, f"on rank {rank} of {self.size}:\n{problems[rank].traceback}")
        elif self.workers:
            _add_note(error, f"on rank {self.rank} of {self.size}, this process")
        raise _CommandFailed(error)

    def _by_rank(self, own: Any, messages: dict[int, Message], kind: type[Any]) -> list[Any]:
        values = {self.rank: own}
        for rank, message in messages.items():
            assert isinstance(message, kind), f"rank {rank} sent {message!r} where {kind} is due"
            values[rank] = message.values if isinstance(message, CommandResult) else message.contribution
        return [values[rank] for rank in range(self.size)]

    def _flush(self) -> None:
        """Drop released blocks, unless a command is under way, which may use them and the pipes."""
        with self._free_pipes() as are_free:
            while are_free and self._released:
                number = self._released.popleft()
                self.context.blocks.drop(number)
                self._names.pop(number, None)
                for worker in self.workers:
                    if number in worker.open_blocks:
                        worker.open_blocks.discard(number)
                        with suppress(PeerProblem):  # the next command reports it
                            worker.pipe.send(Drop((number,)))

    @contextmanager
    def _free_pipes(self) -> Iterator[bool]:
        """Reserve the pipes for messages between commands; yield False if a call is using them."""
        with defer_signals(in_finalizer=True):
            is_locked = self.is_mine and self.lock.acquire(blocking=False)
            are_free = is_locked and not (self._busy or self._unfinished or self.closed or self._lost)
            try:
                if are_free:
                    self._busy, self._unfinished = True, "a message between commands"
                yield are_free
                if are_free:
                    self._unfinished = None
            finally:
                if are_free:
                    self._busy = False
                if is_locked:
                    self.lock.release()

    @contextmanager
    def _watching(self, worker: Worker) -> Iterator[None]:
        """Turn problems with the worker's pipe into RankLost."""
        try:
            yield
        except PeerProblem as error:
            doing = worker.doing  # before the wait, in which a late rank would finish
            how = worker.describe_end(2)
            code = worker.process.poll()
            if code is None:
                is_silent = isinstance(error, DeadlinePassed)
                how = f"does not answer (this process {error})" if is_silent else str(error)
            number = -code if code is not None and code < 0 else None
            if self._lost is None:  # else this process has killed it
                self._lost = RankLost(worker.rank, worker.process.pid, how, number, doing)
            self.kill()
            raise RankLost(*self._lost.args) from error

    def kill(self) -> None:
        """Kill the workers, which ends all waits for them."""
        for worker in self.workers:
            worker.process.kill()

    def _kill_after_interrupt(self, how: str = "was killed because of a second Ctrl-C") -> None:
        if self.workers and self._lost is None:
            worker = self.workers[0]
            self._lost = RankLost(worker.rank, worker.process.pid, how, signal.SIGKILL, worker.doing)
        self.kill()


def _add_note(error: BaseException, note: str) -> None:
    with suppress(Exception):  # some exceptions refuse attributes: the user sees them without the note
        error.add_note(note)


def _unpickle(problem: CommandError) -> BaseException:
    """Return the error of another rank, or a RuntimeError if it cannot be unpickled in this process."""
    try:
        error = unpickle_error(problem.error)
        assert isinstance(error, BaseException)
    except BaseException:  # whatever a user's __reduce__ raises
        return RuntimeError("an error that this process can't read: its text follows")
    return error
