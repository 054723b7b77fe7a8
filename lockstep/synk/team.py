"""The team: this process and its workers. Starts and ends them, and has them all perform commands."""

import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from lockstep.comm.group import Group, World
from lockstep.errors import PeerProblem, UserError
from lockstep.memory.host import HostMemory
from lockstep.memory.malloc import keep_small_freed_memory
from lockstep.synk.commands import (
    Abort,
    Answer,
    Arrived,
    Close,
    Drop,
    Go,
    Message,
    NeedRoom,
    Open,
    Preload,
    Problem,
    Run,
    Step,
)
from lockstep.synk.here import Here, Turn, advance, perform
from lockstep.synk.interrupts import RankLost, whole
from lockstep.synk.preloading import Noticing, needed_for_graphs
from lockstep.synk.shareds import Known
from lockstep.synk.threads import Threads
from lockstep.synk.workers import LEAVE_SECONDS, Worker, connect_all, end_worker, greet, start_worker

if TYPE_CHECKING:
    from lockstep.synk.functions import Function, RowNumbers

ROOM_BYTES = 1 << 20  # the least that a worker's block for results has


class Team:
    """All ranks. One thread at a time has it perform something."""

    def __init__(
        self,
        size: int,
        caller: int,
        threads: int,
        profile: bool,
        deadline: float,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.size, self.rank, self.here = size, caller, Here(caller, size, caller)
        self.known = Known(self)
        self.functions: list[Function] = []
        self.n_functions = 0  # ever made
        self.row_numbers: RowNumbers | None = None
        self.distributed = False
        self.closed = False
        self._lost: RankLost | None = None
        self._noticing: Noticing | None = None
        self._pid = os.getpid()
        self.lock, self._busy = threading.RLock(), False  # one thread at a time
        self._released: deque[int] = deque()
        self._names: dict[int, str] = {}  # of blocks
        self._n_blocks = 0
        keep_small_freed_memory()
        self.threads = Threads(threads)
        ranks = [rank for rank in range(size) if rank != caller]
        self.workers: list[Worker] = []
        try:
            for rank in ranks:
                self.workers.append(start_worker(rank, size, caller, threads, profile, deadline))
            for worker in self.workers:
                with self._watching(worker):
                    greet(worker)
            if devices:
                self._take(devices, deadline)
            elif "pytensor" not in sys.modules:
                self._noticing = Noticing(self._preload)
        except BaseException:
            self.close()
            raise

    def _take(self, devices: tuple[str, ...], deadline: float) -> None:
        """Pipes between all ranks, and each rank's GPU."""
        from lockstep.synk.gpu import UseGpus  # torch and PyCUDA come with it

        own = connect_all(self.workers, self.rank, deadline)
        self.here.group = Group.connected(World.on_one_host(self.size)[self.rank], own, deadline)
        self.ask("taking its GPU", UseGpus(devices))

    def check(self, what: str = "this") -> None:
        """Raises RuntimeError, which names what is asked for, after close(); RankLost when a rank is lost."""
        if self.closed:
            raise RuntimeError(f"{what} belongs to a closed team: call fork(), and make it again")
        if self._lost is not None:
            raise RankLost(*self._lost.args)

    def allocate(self, n_bytes: int, what: str) -> int:
        """A new block's number; it is zero at first. Raises MemoryError, or OSError for descriptors."""
        self.check(what)
        self._flush()
        try:
            block = HostMemory().allocate(n_bytes, what)
        except UserError as error:
            raise MemoryError(f"{what}: no room for {n_bytes / 2**20:,.0f} MiB of shared memory") from error
        except OSError as error:
            raise OSError(error.errno, f"{what}: {error.strerror} (for descriptors: ulimit -n)") from error
        self._n_blocks += 1
        self.here.blocks.add(self._n_blocks, block)
        self._names[self._n_blocks] = what
        return self._n_blocks

    def release(self, *numbers: int) -> None:
        """Lets go of blocks in all ranks. Finalizers call it, at any moment and in any thread."""
        self._released.extend(numbers)
        if self.lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self.lock.release()

    def ask(self, what: str, *steps: Step, own_first: bool = False) -> list[list[Any]]:
        """Has all ranks perform the steps; returns the values by step, then by rank.

        own_first: this process begins, and the others are told when it is at a meeting or done. An error in
        any rank is raised here when all are ready again. Ctrl-C is raised when the command is whole; twice
        kills the workers.
        """
        with self.lock, whole(self._give_up):
            self.check()
            self._busy = True
            try:
                by_rank = self._ask(Run(what, steps), own_first)
            finally:
                self._busy = False
                self._flush()
            return [list(values) for values in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """Ends the workers; harmless when called twice."""
        if self.closed or self._pid != os.getpid():
            return
        if self.here.gpu is not None and self._lost is None:
            self._leave_gpus()
        self.closed = True
        if self._noticing is not None:
            self._noticing.stop()
        for worker in self.workers:
            with suppress(PeerProblem):
                worker.pipe.send(Close())
        for worker in self.workers:
            end_worker(worker, 0 if self._lost else LEAVE_SECONDS)
        self.here.blocks.close()
        self.threads.restore()

    def _preload(self) -> None:
        """Unless a command is under way, or this is a forked child: then it can be done without."""
        if self._pid == os.getpid() and self.lock.acquire(blocking=False):
            try:
                if not (self._busy or self.closed or self._lost):
                    for worker in self.workers:
                        with suppress(PeerProblem):  # the next command finds out, and says it
                            worker.pipe.send(Preload(needed_for_graphs()))
            finally:
                self.lock.release()

    def _leave_gpus(self) -> None:
        from lockstep.synk.gpu import LeaveGpus

        with suppress(RankLost):  # then there is nobody to wait for
            self.ask("leaving its GPU", LeaveGpus())

    def _ask(self, command: Run, own_first: bool) -> list[list[Any]]:
        own = perform(self.here, command.steps)
        turn = advance(own, None) if own_first else None
        if turn is not None and turn.error is not None:
            raise turn.error
        numbers = {number for step in command.steps for number in step.blocks()}
        for worker in self.workers:
            with self._watching(worker):
                self._offer(worker, numbers)
                worker.pipe.send(command)
        turn = turn or advance(own, None)
        while True:
            messages = {worker.rank: self._collect(worker) for worker in self.workers}
            self._check_problems(turn, messages)
            if turn.values is not None:
                return self._by_rank(turn.values, messages, Answer)
            try:
                decision = turn.decide(self, self._by_rank(turn.word, messages, Arrived))
            except BaseException:
                self._send(Abort())
                raise
            self._send(Go(decision))
            turn = advance(own, decision)

    def offer(self, numbers: set[int]) -> None:
        """Sends blocks to the workers that do not have them: in a meeting, before what is decided there."""
        for worker in self.workers:
            with self._watching(worker):
                self._offer(worker, numbers)

    def _offer(self, worker: Worker, numbers: set[int]) -> None:
        for number in numbers - worker.known:
            worker.pipe.send(Open(number, self._names[number]))
            self.here.blocks[number].send(worker.pipe)
            worker.known.add(number)

    def _send(self, message: Any) -> None:
        for worker in self.workers:
            with self._watching(worker):
                worker.pipe.send(message)

    def _collect(self, worker: Worker) -> Message:
        """A worker's word in this round."""
        while True:
            with self._watching(worker):
                message = cast(Message, worker.pipe.receive(object, "its part"))
                if not isinstance(message, NeedRoom):
                    return message
                if worker.results is not None:
                    self._released.append(worker.results)
                n_bytes = max(ROOM_BYTES, message.n_bytes * 5 // 4)
                worker.results = self.allocate(n_bytes, f"results of rank {worker.rank}")
                self._offer(worker, {worker.results})

    def _check_problems(self, turn: Turn, messages: dict[int, Message]) -> None:
        """Raises this process's own error, else the first rank's; all ranks know that the command is over."""
        problems = {rank: m for rank, m in messages.items() if isinstance(m, Problem)}
        if turn.error is None and not problems:
            return
        for worker in self.workers:
            if isinstance(messages[worker.rank], Arrived):
                with self._watching(worker):
                    worker.pipe.send(Abort())
        error = turn.error
        if error is None:
            rank = min(problems)
            error = pickle.loads(problems[rank].error)
            error.add_note(f"on rank {rank} of {self.size}:\n{problems[rank].traceback}")
        elif self.workers:
            error.add_note(f"on rank {self.rank} of {self.size}, this process")
        raise error

    def _by_rank(self, own: Any, messages: dict[int, Message], kind: type[Any]) -> list[Any]:
        found = {self.rank: own}
        for rank, message in messages.items():
            assert isinstance(message, kind), f"rank {rank} sent {message!r} where {kind} is due"
            found[rank] = message.values if isinstance(message, Answer) else message.word
        return [found[rank] for rank in range(self.size)]

    def _flush(self) -> None:
        """Drops what has been released, unless a command is under way, which may use it, and the pipes."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._released:
                number = self._released.popleft()
                self.here.blocks.drop(number)
                self._names.pop(number, None)
                for worker in self.workers:
                    if number in worker.known and not self.closed and self._lost is None:
                        worker.known.discard(number)
                        with suppress(PeerProblem):  # the next command finds out, and says it
                            worker.pipe.send(Drop((number,)))
        finally:
            self._busy = False

    @contextmanager
    def _watching(self, worker: Worker) -> Iterator[None]:
        """What goes wrong with the worker's pipe is RankLost."""
        try:
            yield
        except PeerProblem as error:
            how = worker.describe_end(2)
            code = worker.process.poll()
            if code is None:
                how = str(error)
            number = -code if code is not None and code < 0 else None
            self._lost = RankLost(worker.rank, worker.process.pid, how, number, worker.doing)
            self._kill()
            raise RankLost(*self._lost.args) from error

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()

    def _give_up(self) -> None:
        if self.workers and self._lost is None:
            worker = self.workers[0]
            how = "was killed because of a second Ctrl-C"
            self._lost = RankLost(worker.rank, worker.process.pid, how, signal.SIGKILL, worker.doing)
        self._kill()
