"""Processes: starting them, watching them, ending them. Everything that starts Python processes does it here.

Every child is spawned (never forked) by the launcher, so all are siblings and each has a control pipe to it.
Who dies is noticed by its sentinel at once; who hangs, by a status board that stands still. A run is watched
by `watch`, which ends all when one of them fails; ranks.py collects what each of them has come to.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

from lockstep.comm.messages import Failed, Finished, Notice, Ready, Started, Stop
from lockstep.comm.pipes import START_SECONDS, Pipe
from lockstep.errors import Garbled, PeerProblem
from lockstep.interrupts import STOP_SIGNAL, Interrupts
from lockstep.launch.child import ChildStart, child_main
from lockstep.launch.children import Child, close_connections
from lockstep.launch.status import StatusBoard
from lockstep.memory.leftovers import remove_leftovers

LEAVE_SECONDS = 10.0  # from a child's last message to its end
LISTEN_SECONDS = 0.5  # between two looks at signals and status boards
GATHER_SECONDS = 1.0  # after a failure, for the others to say what they saw
# The same where all that is known is that someone waited in vain: others may have, and say so a bit later.
LATE_SECONDS = 4.0
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by someone, or by the kernel for lack of memory: see dmesg)",
    signal.SIGBUS: " (shared memory or a file went away under it: see df and dmesg)",
}


@dataclass(frozen=True)
class Ending:
    """How a run ended: exit code, the one message that says why, and the traceback of a bug.

    lost: the name of the process that was killed or hangs, where that is why. awaited: whom a process waited
    for in vain that is not one of this host.
    """

    code: int
    message: str = ""
    traceback: str = ""
    lost: str = ""
    awaited: str = ""


class Processes:
    """All children of a launcher. Use it as a context manager: on leaving, none of them is left.

    deadline: seconds that one waits for another. interrupts: where the launcher has installed none, a child
    that is asked to end (SIGTERM) does so. method: how multiprocessing starts them, 'spawn' or 'forkserver'.
    has_begun: whether training has.
    """

    def __init__(self, deadline: float, interrupts: Interrupts | None = None, method: str = "spawn") -> None:
        self._deadline = deadline
        self._stop_signal = STOP_SIGNAL if interrupts else None
        self._interrupts = interrupts or Interrupts()
        self._asked_to_stop = self.has_begun = False
        self._children: list[Child] = []
        self._context = multiprocessing.get_context(method)
        resource_tracker.ensure_running()  # now: starting it unblocks the signals that `start` has blocked
        self._lifeline, self._lifeline_end = self._context.Pipe(duplex=False)

    def __enter__(self) -> "Processes":
        self._interrupts.note()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def start(
        self,
        name: str,
        entry: str,
        arguments: tuple[Any, ...],
        speaker: bool = False,
        spares: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """Spawns a child that runs `entry` ('module:function'); see `child_main`.

        The caller closes its own copies of connections among the arguments. spares: arguments with which
        `watch` starts it again when it is killed, each once; their connections are this object's to close.
        """
        self._children.append(self._spawn(name, entry, arguments, spares, speaker))

    def _spawn(
        self, name: str, entry: str, arguments: tuple[Any, ...], spares: Sequence[Any], speaker: bool = False
    ) -> Child:
        ours, theirs = self._context.Pipe()
        start = ChildStart(
            name,
            entry,
            arguments,
            theirs,
            self._lifeline,
            os.getpid(),
            self._context.get_start_method() == "spawn",
            self._deadline,
            self._stop_signal,
            speaker,
        )
        process = self._context.Process(target=child_main, args=(start,), name=name)  # type: ignore[attr-defined]
        with self._interrupts.ignored_by_children():
            process.start()
        theirs.close()
        pipe = Pipe(ours, name, self._deadline)
        return Child(name, entry, process, pipe, time.monotonic(), list(spares))

    def exit_codes(self) -> dict[str, int | None]:
        """By name; None of those that are still there."""
        return {child.name: child.process.exitcode for child in self._children}

    def pids(self) -> dict[str, int | None]:
        """The process numbers by name, for the log: what to attach a debugger to."""
        return {child.name: child.process.pid for child in self._children}

    def watch(
        self, on_message: Callable[[Any], None], elsewhere: Callable[[], PeerProblem | None] | None = None
    ) -> Ending:
        """Passes the children's messages on until all have left, or one has failed. Returns how it ended.

        elsewhere: where there are other hosts, says at once whether one has failed.
        """
        self._now = time.monotonic()  # of the last look: what is missing since, this process missed itself
        while any(child.process.exitcode is None or not child.is_well() for child in self._children):
            self._see_off()
            self.listen(on_message, LISTEN_SECONDS)
            before, self._now = self._now, time.monotonic()
            self._forgive(self._now - before - 2 * LISTEN_SECONDS)
            failing = self._someone_fails() and not self._start_again(on_message)
            if failing and (ending := self._explain_failure(on_message)):
                return ending
            if elsewhere and (failed := elsewhere()) is not None:
                return Ending(1, str(failed), awaited=failed.peer)
            if self._interrupts.at_once:
                return Ending(self._interrupts.code, "stopped at once, without saving")
            if self._interrupts.code and not self.has_begun:
                return Ending(self._interrupts.code)  # there is nothing to save
            if self._interrupts.code and not self._asked_to_stop:
                on_message(Notice("stopping after this step, and saving; once more to leave at once"))
                self._ask_to_stop()
        stopped = any(child.finished and child.finished.stopped for child in self._children)
        return Ending(self._interrupts.code if stopped else 0)

    def doing(self) -> str:
        """What each of them is at, in a line; any thread may ask."""
        return "; ".join(f"{child.name}: {child.doing}" for child in list(self._children)) or "starting"

    def end(self) -> None:
        """Kills and reaps whoever is left. Harmless when called twice.

        SIGKILL, for nothing would be gained by asking first: what children write is whole at any moment.
        """
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.join(LEAVE_SECONDS)
            child.control.close()
            for spare in child.spares:
                close_connections(spare)
        gone = [child.process for child in self._children if child.process.exitcode is not None]
        remove_leftovers(process.pid for process in gone if process.pid is not None)

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

    def listen(self, on_message: Callable[[Any], None], seconds: float) -> None:
        """Waits for something to happen, at most so long, and passes on what the children have said."""
        pipes = [child.control for child in self._children if child.listening]
        sentinels = [child.process.sentinel for child in self._children if child.process.exitcode is None]
        wait([pipe.fileno() for pipe in pipes] + sentinels, seconds)
        for child in self._children:
            child.notice_movement()
            try:
                while child.listening and child.control.poll():
                    self._take(child, child.control.receive(object, "a message"), on_message)
            except Garbled as error:
                child.failure, child.listening = Failed("crash", str(error)), False
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
            self.has_begun = self.has_begun or isinstance(message, Started)
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

    def _someone_fails(self) -> bool:
        return any(not child.is_well() or self._is_stuck(child) for child in self._children)

    def _start_again(self, on_message: Callable[[Any], None]) -> bool:
        """Starts those again that were killed and have spare arguments. Returns whether all are well then."""
        self.listen(on_message, 0)  # the last words of those who have left since
        for place, child in enumerate(self._children):
            if child.spares and not child.is_well() and not child.failure:
                text = f"{self._describe_silent(child)}; it is started again"
                on_message(Notice(f"{text} (restarts left: {len(child.spares) - 1})"))
                child.control.close()
                arguments, *spares = child.spares
                self._children[place] = self._spawn(child.name, child.entry, arguments, spares)
                close_connections(arguments)
        return not self._someone_fails()

    def _explain_failure(self, on_message: Callable[[Any], None]) -> Ending | None:
        """None where all that was wrong is that someone stood still, who has moved since."""
        begin = self._now = time.monotonic()
        while any(child.process.exitcode is None for child in self._children):
            in_vain = min(self._innocence(child) for child in self._children) == 2
            if time.monotonic() - begin > (LATE_SECONDS if in_vain else GATHER_SECONDS):
                break
            self.listen(on_message, 0.1)
        self.listen(on_message, 0)  # the last words of those who left since
        if not self._someone_fails():
            return None
        culprit, waiter = self._follow(min(self._children, key=self._innocence))
        if waiter and waiter.failure and culprit.failure is None:
            text = f"{self._describe_silent(culprit)}; {waiter.name} {waiter.failure.text}"
            return Ending(1, text, lost=culprit.name)
        if culprit.failure is None:
            return Ending(1, self._describe_silent(culprit), lost=culprit.name)
        if culprit.failure.kind == "user":
            return Ending(2, f"{culprit.name}: {culprit.failure.text}")
        text = f"{culprit.text} failed at {culprit.doing}: {culprit.failure.text}"
        return Ending(1, text, culprit.failure.traceback, awaited=culprit.failure.peer)

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
