"""The launcher's side of a run: starts the processes, watches them, and ends them all when one of them fails.

Every child is spawned (never forked) by the launcher, so all are siblings and each has a control pipe to it.
Who dies is noticed by its sentinel at once; who hangs, by a status board that stands still.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from lockstep.child import STOP_SIGNAL, ChildStart, child_main
from lockstep.errors import PeerProblem
from lockstep.messages import Failed, Finished, Notice, Ready, Stop
from lockstep.pipes import START_SECONDS, Pipe
from lockstep.status import StatusBoard

LEAVE_SECONDS = 10.0  # from a child's last message to its end
LISTEN_SECONDS = 0.5  # between two looks at signals and status boards
GATHER_SECONDS = 1.0  # after a failure, for the others to say what they saw
# The same where all that is known is that someone waited in vain: others may have, and say so a bit later.
LATE_SECONDS = 4.0
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by someone, or by the kernel for lack of memory: see dmesg)",
    signal.SIGBUS: " (shared memory or a file went away under it: see df and dmesg)",
}


@dataclass
class Child:
    """The launcher's view of one child."""

    name: str
    process: SpawnProcess
    control: Pipe
    moved: float  # when it last gave a sign of life (monotonic clock)
    board: StatusBoard | None = None
    board_count: int = 0
    listening: bool = True  # until it closes its end of the control pipe
    failure: Failed | None = None
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    @property
    def doing(self) -> str:
        return self.board.read() if self.board else "starting"

    def notice_movement(self) -> None:
        """Remembers the time when the status board has changed since the last call."""
        count = self.board.count() if self.board else 0
        if count != self.board_count:
            self.board_count, self.moved = count, time.monotonic()

    def is_well(self) -> bool:
        """Working, or done: all that it was for is in place when it says so, however its process ends."""
        return self.failure is None and (self.process.exitcode is None or self.finished is not None)


@dataclass(frozen=True)
class Ending:
    """How a run ended: exit code, the one message that says why, and the traceback of a bug."""

    code: int
    message: str = ""
    traceback: str = ""


class Interrupts:
    """Notes Ctrl-C and SIGTERM in the launcher. Once: stop in good order. Again, a second later: at once.

    A second later, because `timeout` and cluster managers send the same signal to a process and to its group.
    """

    def __init__(self) -> None:
        self.code = 0  # the exit code of a stopped run; 0 while nobody has asked to stop
        self.at_once = False
        self._first = 0.0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if not self.code:
            self.code = 128 + (signal.SIGTERM if number == STOP_SIGNAL else number)
            self._first = time.monotonic()
        elif number != STOP_SIGNAL and time.monotonic() - self._first > 1:
            self.at_once = True

    @contextmanager
    def ignored_by_children(self) -> Iterator[None]:
        """Processes started inside ignore the signals from birth; one that comes meanwhile is kept."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class Processes:
    """All children of a run. Use it as a context manager: on leaving, none of them is left."""

    def __init__(self, deadline: float, interrupts: Interrupts) -> None:
        self._deadline = deadline
        self._interrupts = interrupts
        self._asked_to_stop = False
        self._children: list[Child] = []
        self._context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # now: starting it unblocks the signals that `start` has blocked
        self._lifeline, self._lifeline_end = self._context.Pipe(duplex=False)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def start(self, name: str, entry: str, arguments: tuple[Any, ...], speaker: bool = False) -> None:
        """Spawns a child that runs `entry` ('module:function'); see `child_main`.

        The caller closes its own copies of connections among the arguments.
        """
        ours, theirs = self._context.Pipe()
        start = ChildStart(
            name, entry, arguments, theirs, self._lifeline, os.getpid(), self._deadline, speaker
        )
        process = self._context.Process(target=child_main, args=(start,), name=name)
        with self._interrupts.ignored_by_children():
            process.start()
        theirs.close()
        pipe = Pipe(ours, name, self._deadline)
        self._children.append(Child(name, process, pipe, time.monotonic()))

    def pids(self) -> dict[str, int | None]:
        """The process numbers by name, for the log: what to attach a debugger to."""
        return {child.name: child.process.pid for child in self._children}

    def watch(self, on_message: Callable[[Any], None]) -> Ending:
        """Passes the children's messages on until all have left, or one has failed. Returns how it ended."""
        self._now = time.monotonic()  # of the last look: what is missing since, this process missed itself
        while any(child.process.exitcode is None or not child.is_well() for child in self._children):
            self._see_off()
            self._listen(on_message, LISTEN_SECONDS)
            before, self._now = self._now, time.monotonic()
            self._forgive(self._now - before - 2 * LISTEN_SECONDS)
            if any(not child.is_well() or self._is_stuck(child) for child in self._children):
                return self._explain_failure(on_message)
            if self._interrupts.at_once:
                return Ending(self._interrupts.code, "stopped at once, without saving")
            if self._interrupts.code and not self._asked_to_stop:
                on_message(Notice("stopping after this step, and saving; once more to leave at once"))
                self._ask_to_stop()
        stopped = any(child.finished and child.finished.stopped for child in self._children)
        return Ending(self._interrupts.code if stopped else 0)

    def end(self) -> None:
        """Kills and reaps whoever is left. Harmless when called twice.

        SIGKILL, for nothing would be gained by asking first: what children write is whole at any moment.
        """
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.join(LEAVE_SECONDS)
            child.control.close()

    def _ask_to_stop(self) -> None:
        self._asked_to_stop = True
        for child in self._children:
            if child.listening and child.name.startswith("trainer"):
                with suppress(PeerProblem):  # it leaves or dies just now, which is told elsewhere
                    child.control.send(Stop())

    def _forgive(self, seconds: float) -> None:
        """After a time in which this process itself stood still (Ctrl-Z, a laptop's lid), nobody is late."""
        if seconds > 0:
            for child in self._children:
                child.moved += seconds

    def _listen(self, on_message: Callable[[Any], None], seconds: float) -> None:
        pipes = [child.control for child in self._children if child.listening]
        sentinels = [child.process.sentinel for child in self._children if child.process.exitcode is None]
        wait([pipe.fileno() for pipe in pipes] + sentinels, seconds)
        for child in self._children:
            child.notice_movement()
            try:
                while child.listening and child.control.poll():
                    self._take(child, child.control.receive(object, "a message"), on_message)
            except PeerProblem:  # it has closed its end; its exit code says the rest
                child.listening = False

    def _take(self, child: Child, message: object, on_message: Callable[[Any], None]) -> None:
        child.moved = time.monotonic()
        if isinstance(message, Ready):
            child.board = StatusBoard.receive(child.control)
        elif isinstance(message, Failed):
            child.failure = message
        elif isinstance(message, Finished):
            child.finished = message
        else:
            on_message(message)

    def _see_off(self) -> None:
        """Ends children that have said that they are done and don't leave: libraries may hang at the end."""
        for child in self._children:
            if child.finished and time.monotonic() - child.moved > LEAVE_SECONDS:
                child.process.kill()

    def _is_stuck(self, child: Child) -> bool:
        """Backstop for what no deadline of a pipe covers: a child that stands still."""
        if child.process.exitcode is not None or child.finished:
            return False
        starting = child.board_count <= 1  # importing what it needs
        # Later on, those who wait for it say so first, and better.
        patience = max(START_SECONDS, self._deadline) if starting else self._deadline + 3
        return self._now - child.moved > patience

    def _explain_failure(self, on_message: Callable[[Any], None]) -> Ending:
        begin = self._now = time.monotonic()
        while any(child.process.exitcode is None for child in self._children):
            in_vain = min(self._innocence(child) for child in self._children) == 2
            if time.monotonic() - begin > (LATE_SECONDS if in_vain else GATHER_SECONDS):
                break
            self._listen(on_message, 0.1)
        self._listen(on_message, 0)  # the last words of those who left since
        culprit, waiter = self._follow(min(self._children, key=self._innocence))
        if waiter and waiter.failure:
            return Ending(1, f"{self._describe_silent(culprit)}; {waiter.name} {waiter.failure.text}")
        if culprit.failure is None:
            return Ending(1, self._describe_silent(culprit))
        if culprit.failure.kind == "user":
            return Ending(2, f"{culprit.name}: {culprit.failure.text}")
        text = f"{culprit.text} failed at {culprit.doing}: {culprit.failure.text}"
        return Ending(1, text, culprit.failure.traceback)

    def _follow(self, child: Child) -> tuple[Child, Child | None]:
        """From one that waited in vain to the one it waited for, and on: the last one is the cause.

        Returns the cause and the one that waited for it, None where `child` itself is the cause.
        """
        children = {other.name: other for other in self._children}
        waiters: list[Child] = []
        while child not in waiters and child.failure and child.failure.peer in children:
            waiters.append(child)
            child = children[child.failure.peer]
        return child, waiters[-1] if waiters else None

    def _innocence(self, child: Child) -> int:
        """The lowest is the cause: a silent death, then an error of its own, then the loss of another."""
        if child.failure:
            return {"user": 1, "crash": 1, "lost": 2}[child.failure.kind]
        return 0 if not child.is_well() else 3 if self._is_stuck(child) else 4

    def _describe_silent(self, child: Child) -> str:
        code = child.process.exitcode
        if code is None:
            seconds = time.monotonic() - child.moved
            return f"{child.text} has stood still for {seconds:.0f} s at: {child.doing}"
        return f"{child.text} {describe_exit(code)} at: {child.doing}"


def describe_exit(code: int) -> str:
    """What an exit code says of a process that should not have left."""
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by {known.get(-code, f'signal {-code}')}{_HINTS.get(-code, '')}"
    return f"left with exit code {code}"
