"""Starting, watching and ending child processes: every Python process of Lockstep's launcher is started here.

Children are forked by a template process (template.py) or spawned. The launcher is the parent of all, so they
are siblings, and each has a control pipe to it. A child that dies is noticed at once by its sentinel; a child
that hangs, by a status board that stops changing. `Processes.watch` watches a run, restarts killed loaders,
and ends the run when another child fails; ranks.py collects results.
"""

import multiprocessing
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.comm.messages import Failed, Finished, LoaderRestarted, Ready, Started, Stop, WarningMessage
from lockstep.comm.pipes import START_SECONDS, Pipe
from lockstep.errors import Garbled, PeerProblem, UserError
from lockstep.launch.child_main import ChildStart, child_main
from lockstep.launch.children import Child, ExitStatus, close_connections
from lockstep.launch.status import StatusBoard
from lockstep.launch.template import Stopped, Template
from lockstep.memory.host import HostMemory
from lockstep.memory.leftovers import remove_leftovers
from lockstep.runs.snapshot import SnapshotMemory
from lockstep.signals import STOP_SIGNAL, Interrupts, signals_blocked

LEAVE_SECONDS = 10.0  # from a child's last message to its exit
LISTEN_SECONDS = 0.5  # between two checks of signals and status boards
GATHER_SECONDS = 1.0  # after a failure, for the other children to report what they saw
# The same when the only reports so far are timeouts: others may time out on the same child a bit later.
LATE_SECONDS = 4.0


class Processes:
    """All children of a launcher. Use it as a context manager: no child is left when the block ends.

    Args:
        timeout: Seconds for which a process waits for another.
        interrupts: The launcher's signal handling; without it a child exits on SIGTERM.
        method: multiprocessing's start method, 'spawn' or 'forkserver'.
        has_main: Whether children import the program's main file.
        template: Forks the children, instead of `method`.
        passes_on_sigterm: Whether children pass SIGTERM on, instead of exiting, also without `interrupts`.

    Attributes:
        has_begun: Whether training has started.
        is_overdue: Returns whether a run that was asked to stop has no time left to do so in order.
        is_to_pause: Returns whether the trainers are to save in memory and exit, because the run resumes.
        may_restart: Returns whether a killed loader may be started again without the others.
    """

    def __init__(
        self,
        timeout: float,
        interrupts: Interrupts | None = None,
        method: str = "spawn",
        has_main: bool = False,
        template: Template | None = None,
        passes_on_sigterm: bool = False,
    ) -> None:
        self._timeout = timeout
        self._stop_signal = STOP_SIGNAL if interrupts or passes_on_sigterm else None
        self._interrupts = interrupts or Interrupts()
        self._asked_to_stop = self.has_begun = False
        self.is_overdue: Callable[[], bool] = lambda: False
        self.is_to_pause: Callable[[], bool] = lambda: False
        self.may_restart: Callable[[], bool] = lambda: True
        self._is_pausing = False
        self._main = nullcontext if has_main else _without_main_file
        self._children: list[Child] = []
        self._template = template
        self._context = multiprocessing.get_context(method)
        if template is None:
            _start_resource_tracker()  # now: starting it unblocks the signals that `_spawn_process` blocks
        self._liveness, self._liveness_end = self._context.Pipe(duplex=False)

    def __enter__(self) -> "Processes":
        self._interrupts.note()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    # -- starting --------------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        entry: str,
        arguments: tuple[Any, ...],
        reporting: bool = False,
        spares: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """Start a child that runs a function; see `child_main`.

        Only the child keeps the connections among its arguments, so that its death closes its pipes: this
        process closes its own copies.

        Args:
            entry: The function, as 'module:function'.
            reporting: Whether this child reports the launcher's death.
            spares: Arguments for `watch` to start the child again with when it is killed, each used once.
                This object closes their connections.

        Raises:
            UserError: The operating system refuses another process.
            PeerProblem: The template process does not answer, and neither do those that replace it.
            Stopped: A signal ends the run meanwhile.
        """
        self._children.append(self._spawn(name, entry, arguments, spares, reporting))

    def _spawn(
        self,
        name: str,
        entry: str,
        arguments: tuple[Any, ...],
        spares: Sequence[tuple[Any, ...]],
        reporting: bool = False,
    ) -> Child:
        launcher_end, child_end = self._context.Pipe()
        start = ChildStart(
            name=name,
            entry=entry,
            arguments=arguments,
            control=child_end,
            liveness=self._liveness,
            launcher=os.getpid(),
            is_own_child=self._template is not None or self._context.get_start_method() == "spawn",
            timeout=self._timeout,
            stop_signal=self._stop_signal,
            reporting=reporting,
        )
        try:
            if self._template:
                process: Any = self._template.start(start, self._is_stopped)
            else:
                process = self._spawn_process(start)
        except OSError as error:
            raise UserError(f"{name}: can't be started: {error.strerror} (see ulimit -u and -n)") from error
        close_connections([child_end, *arguments])
        pipe = Pipe(launcher_end, name, self._timeout)
        return Child(name, entry, process, pipe, time.monotonic(), list(spares))

    def _spawn_process(self, start: ChildStart) -> BaseProcess:
        make = self._context.Process  # type: ignore[attr-defined]
        process: BaseProcess = make(target=child_main, args=(start,), name=start.name)
        with signals_blocked(), self._main():
            process.start()
        return process

    def exit_codes(self) -> dict[str, int | None]:
        """Return the exit codes by name; None for children that are still running."""
        return {child.name: child.process.exitcode for child in self._children}

    def pids(self) -> dict[str, int | None]:
        """Return the process ids by name, for the log and for attaching a debugger."""
        return {child.name: child.process.pid for child in self._children}

    def last_step(self) -> tuple[int, int]:
        """Return epoch and number of the last step that any trainer completed, (0, 0) before the first."""
        return max((child.board.last_step() for child in self._children if child.board), default=(0, 0))

    def doing(self) -> str:
        """Return one line with every child's status. Any thread may call this."""
        return "; ".join(f"{child.name}: {child.doing}" for child in list(self._children)) or "starting"

    # -- watching --------------------------------------------------------------------------------------------

    def watch(
        self,
        on_message: Callable[[Any], None],
        find_remote_failure: Callable[[], PeerProblem | None] | None = None,
    ) -> ExitStatus:
        """Pass on the children's messages until all children have left or the run has to end.

        Args:
            on_message: Called with each message of a child.
            find_remote_failure: Returns at once whether another host has failed; None without other hosts.
        """
        # The time of the last check. Children are not late while this process is suspended.
        self._now = time.monotonic()
        while any(child.is_running or not child.is_well() for child in self._children):
            self._kill_lingering()
            self.listen(on_message, LISTEN_SECONDS)
            previous, self._now = self._now, time.monotonic()
            self._extend_deadlines(self._now - previous - 2 * LISTEN_SECONDS)
            exit_status = (
                self._handle_failures(on_message)
                or _remote_failure(find_remote_failure)
                or self._forward_signals(on_message)
            )
            if exit_status and (exit_status.lost or exit_status.awaited or exit_status.is_overdue):
                self._kill()
                self.listen(on_message, 0)  # the last memory checkpoint must be known
            if exit_status:
                return exit_status
        if not any(child.finished and child.finished.stopped for child in self._children):
            return ExitStatus(0)
        code = self._interrupts.code
        return ExitStatus(code, is_overdue=self._is_pausing and code > 0, is_paused=self._is_pausing)

    def listen(self, on_message: Callable[[Any], None], seconds: float) -> None:
        """Wait up to `seconds` for something to happen, and pass on what the children have sent."""
        pipes = [child.control for child in self._children if child.listening]
        sentinels = [child.process.sentinel for child in self._children if child.is_running]
        wait([pipe.fileno() for pipe in pipes] + sentinels, seconds)
        for child in self._children:
            child.note_activity()
            try:
                while child.listening and child.control.poll():
                    self._take(child, child.control.receive(object, "a message"), on_message)
            except Garbled as error:
                child.failure, child.listening = Failed("crash", str(error)), False
            except PeerProblem:  # it has closed its end; its exit code says the rest
                child.listening = False

    def _take(self, child: Child, message: object, on_message: Callable[[Any], None]) -> None:
        child.last_active = time.monotonic()
        if isinstance(message, Ready):
            child.board = StatusBoard.receive(child.control)
        elif isinstance(message, SnapshotMemory):
            on_message(HostMemory().receive(child.control, "its memory checkpoints"))
        elif isinstance(message, Failed):
            child.failure = message
        elif isinstance(message, Finished):
            child.finished = message
        else:
            self.has_begun = self.has_begun or isinstance(message, Started)
            on_message(message)

    def _kill_lingering(self) -> None:
        """Kill children that have reported that they are done and do not exit: a library may hang at exit."""
        for child in self._children:
            if child.finished and time.monotonic() - child.last_active > LEAVE_SECONDS:
                child.process.kill()

    def _extend_deadlines(self, seconds: float) -> None:
        """Extend all deadlines by the time for which this process was suspended (Ctrl-Z, a laptop's lid)."""
        if seconds > 0:
            for child in self._children:
                child.last_active += seconds

    # -- interrupts ------------------------------------------------------------------------------------------

    def _forward_signals(self, on_message: Callable[[Any], None]) -> ExitStatus | None:
        """Return the status of a run that a signal ends now. The first signal asks the trainers to stop."""
        if self._is_stopped():
            return ExitStatus.stopped_by(self._interrupts)
        code = self._interrupts.code
        if code and not self._asked_to_stop:
            on_message(WarningMessage("stopping after this step, and saving; once more to leave at once"))
            self._ask_to_stop(Stop())
        if self.has_begun and not self._asked_to_stop and self.is_to_pause():
            self._is_pausing = True
            self._ask_to_stop(Stop(to_disk=False))
        if self._interrupts.is_asked_for_status:
            self._interrupts.is_asked_for_status = False
            on_message(WarningMessage(f"status: {self.doing()}"))
        if code and self.is_overdue():
            return ExitStatus(code, is_overdue=True)
        return None

    def _is_stopped(self) -> bool:
        """Return whether a signal ends the run now: a second one, or one with nothing to save yet."""
        return self._interrupts.at_once or (self._interrupts.code > 0 and not self.has_begun)

    def _ask_to_stop(self, message: Stop) -> None:
        self._asked_to_stop = True
        for child in self._children:
            if child.listening and child.name.startswith("trainer"):
                with suppress(PeerProblem):  # it is exiting; `watch` sees how
                    child.control.send(message)

    # -- failures --------------------------------------------------------------------------------------------

    def _handle_failures(self, on_message: Callable[[Any], None]) -> ExitStatus | None:
        """Restart killed loaders that have spares. Return the run's status if a child still fails."""
        while failing := self._failing():
            self.listen(on_message, 0)
            killed = [each for each in failing if each.spares and not each.is_well() and not each.failure]
            if not killed or not self.may_restart():
                return self._explain_failure(on_message)
            for child in killed:  # meanwhile others may be killed, hence the loop around
                self._restart_loader(child, on_message)
        return None

    def _restart_loader(self, child: Child, on_message: Callable[[Any], None]) -> None:
        """Start a killed loader again, with the next of its spare pipes (`loader_restarts`).

        Its trainer finds the new loader at the other end of that pipe (loading/feed.py), and repeats its
        requests, so the bits are the same. The loss of another child resumes the run: recovery.py.
        """
        begin, failure = time.monotonic(), child.describe_silence()
        child.control.close()
        arguments, *spares = child.spares
        new = self._children[self._children.index(child)] = self._spawn(
            child.name, child.entry, arguments, spares
        )
        seconds = round(time.monotonic() - begin, 3)
        on_message(LoaderRestarted(child.name, failure, new.process.pid or 0, len(spares), seconds))

    def _failing(self) -> list[Child]:
        return [child for child in self._children if not child.is_well() or self._is_stuck(child)]

    def _is_stuck(self, child: Child) -> bool:
        """Return whether the child makes no progress: the backstop for what no pipe's timeout covers."""
        if not child.is_running or child.finished:
            return False
        # A loader waits for its trainer's network until training begins.
        is_starting = child.board_count <= 1 or (child.name.startswith("loader") and not self.has_begun)
        # Later on a process that waits for it times out first, and knows more.
        patience = max(START_SECONDS, self._timeout) if is_starting else self._timeout + 3
        return self._now - child.last_active > patience

    def _explain_failure(self, on_message: Callable[[Any], None]) -> ExitStatus | None:
        """Return the status that names the cause, or None if a child only seemed stuck and has resumed."""
        self._gather_reports(on_message)
        if not self._failing():
            return None
        culprit, waiter = self._follow(self._suspect(on_message))
        if waiter and waiter.failure and culprit.failure is None:
            text = f"{culprit.describe_silence()}; {waiter.name} {waiter.failure.text}"
            return ExitStatus(1, text, lost=culprit.name)
        if culprit.failure is None:
            return ExitStatus(1, culprit.describe_silence(), lost=culprit.name)
        if culprit.failure.kind == "user":
            return ExitStatus(2, f"{culprit.name}: {culprit.failure.text}")
        if culprit.failure.kind == "faulty":
            text = f"{culprit.text}: {culprit.failure.text}"
            return ExitStatus(1, text, lost=culprit.name, is_faulty=True)
        text = f"{culprit.text} failed at {culprit.doing}: {culprit.failure.text}"
        peer = culprit.failure.peer
        # Two children that wait for each other have been held up, and so has one that waits for the launcher.
        lost = {child.name: child.name for child in self._children} | {"the launcher": culprit.name}
        if peer in lost:
            return ExitStatus(1, text, lost=lost[peer])
        return ExitStatus(1, text, culprit.failure.traceback, awaited=peer)

    def _gather_reports(self, on_message: Callable[[Any], None]) -> None:
        """Listen for a moment: the other children notice a failure too, and may know its cause."""
        begin = self._now = time.monotonic()
        while any(child.is_running for child in self._children):
            suspect = min(self._children, key=self._innocence)
            least, _ = self._innocence(suspect)
            # Others can only report the loss of one that has died or is stopped.
            if least == 0 or self._follow(suspect)[0].is_stopped():
                break
            only_timeouts = least == 2
            if time.monotonic() - begin > (LATE_SECONDS if only_timeouts else GATHER_SECONDS):
                break
            self.listen(on_message, 0.1)
        self.listen(on_message, 0)  # the last messages of children that have exited since

    def _suspect(self, on_message: Callable[[Any], None]) -> Child:
        """Return the least innocent child. One that has exited since its pipe was read may have sent why."""
        while True:
            suspect = min(self._children, key=self._innocence)
            self.listen(on_message, 0)
            if min(self._children, key=self._innocence) is suspect:
                return suspect

    def _follow(self, child: Child) -> tuple[Child, Child | None]:
        """Follow the chain from a child that lost a peer to that peer, and on to the last one, the cause.

        Returns:
            The cause, and the child that waited for it; None if `child` itself is the cause.
        """
        children = {other.name: other for other in self._children}
        waiters: list[Child] = []
        while child not in waiters and child.failure and child.failure.peer in children:
            waiters.append(child)
            child = children[child.failure.peer]
        return child, waiters[-1] if waiters else None

    def _innocence(self, child: Child) -> tuple[int, float]:
        """Rank a child as cause, lowest first: a silent death, then an own error, then the loss of a peer.

        Among equals the first to report comes first: a slow child loses the peer that has given it up.
        """
        if child.failure:
            rank = {"user": 1, "crash": 1, "faulty": 1, "lost": 2}[child.failure.kind]
        elif not child.is_well():
            rank = 0
        elif child.is_running and child.is_stopped():
            rank = 3
        else:
            rank = 4 if self._is_stuck(child) else 5
        return rank, child.last_active

    # -- ending ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Kill and reap all children that are left. Harmless when called twice.

        SIGKILL at once, because nothing is gained by asking first: what children write is whole at any
        moment.
        """
        self._kill()
        for child in self._children:
            child.control.close()
            for spare in child.spares:
                close_connections(spare)
        ended = [child.process.pid for child in self._children if not child.is_running]
        remove_leftovers(pid for pid in ended if pid is not None)

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.join(LEAVE_SECONDS)


def run_trainers(
    template: Template,
    timeout: float,
    interrupts: Interrupts,
    entry: str,
    arguments: Iterable[tuple[Any, ...]],
    on_message: Callable[[Any], None],
) -> ExitStatus:
    """Run a process for each rank until all have exited, and return how they ended.

    Args:
        template: Forks them.
        timeout: Seconds for which a process waits for another.
        interrupts: The program's signal handling.
        entry: The function, as 'module:function'.
        arguments: Of each rank.
        on_message: Called with each message of a process.

    Raises:
        UserError: The operating system refuses another process.
    """
    with Processes(timeout, interrupts, template=template) as processes:
        try:
            for rank, own in enumerate(arguments):
                processes.start(f"trainer {rank}", entry, own, reporting=rank == 0)
            return processes.watch(on_message)
        except PeerProblem as error:  # no template starts any more
            return ExitStatus(error.code, str(error))
        except Stopped:
            return ExitStatus.stopped_by(interrupts)


def connect_all(n_processes: int) -> list[dict[int, Connection]]:
    """Return pipes between every two of `n_processes` processes: a dict from peer to connection for each."""
    connections: list[dict[int, Connection]] = [{} for _ in range(n_processes)]
    for rank in range(n_processes):
        for peer in range(rank):
            connections[rank][peer], connections[peer][rank] = multiprocessing.Pipe()
    return connections


def _remote_failure(find: Callable[[], PeerProblem | None] | None) -> ExitStatus | None:
    failure = find() if find else None
    return ExitStatus(1, str(failure), awaited=failure.peer) if failure is not None else None


def _start_resource_tracker() -> None:
    """Start multiprocessing's helper process so that SIGHUP does not end it; it ignores other signals."""
    with signals_blocked():
        resource_tracker.ensure_running()


@contextmanager
def _without_main_file() -> Iterator[None]:
    """Keep processes that are started inside the block from importing the file of `__main__`.

    multiprocessing imports that file into each spawned process, so a script without an
    `if __name__ == "__main__":` guard would run once more in each. A child needs nothing of it, since its
    function is named as 'module:function'. Objects of `__main__` cannot be arguments.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
