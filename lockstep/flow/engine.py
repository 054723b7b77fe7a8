"""The engine: runs functions on the lanes of several devices as soon as their inputs are ready."""

import atexit
import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from lockstep.errors import UserError
from lockstep.flow import graph, placement, private, trace
from lockstep.flow.devices import LANES, Device
from lockstep.flow.graph import GRAPH, Submission, Uses
from lockstep.flow.lanes import POLL_SECONDS, WORKER, Failure, Lane, Operation, OperationError

_OPEN: "weakref.WeakValueDictionary[int, Engine]" = weakref.WeakValueDictionary()  # by id
_numbers = itertools.count()  # program order, of all engines together


class _DryRun(threading.local):
    """A thread's mode: in a dry run, operations are scheduled and not executed."""

    dry = False


_dry_run = _DryRun()


class Cancelled(RuntimeError):
    """The engine was closed, or the process forked, before the operation started."""


class Variable(Uses):
    """A name for something that operations read and write. It has no value; the functions know what it is."""

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name


class Engine:
    """A scheduler that runs pushed functions out of order, as soon as their hazards allow.

    As a context manager it waits for everything on exit, or closes at once after an error. Arrays that are
    made inside are on its first device, unless another is set.

    Args:
        devices: Each can be in one open engine at a time.
        run_ahead: `push` blocks while this many operations are pending.

    Raises:
        UserError: There are no devices, or another engine has one of them.
    """

    def __init__(self, devices: Iterable[Device], run_ahead: int = 10_000) -> None:
        if not isinstance(run_ahead, int) or run_ahead < 1:
            raise UserError(
                f"run_ahead is the number of operations that may be pending: 1 or more, not {run_ahead}"
            )
        self.devices: list[Device] = []
        self.run_ahead = run_ahead
        self._resume_at = run_ahead * 3 // 4  # waking up for each operation would be slow
        self.closed = False
        self._lanes: dict[tuple[Device, str], Lane] = {}
        self.pending: set[Operation] = set()  # in the graph, and not done
        self._waiters: list[threading.Lock] = []
        self._failures: list[Failure] = []
        self._scope: Any = None  # of the current device, while this is a context manager
        if not isinstance(devices, Iterable) or not (devices := list(devices)):
            raise UserError("an engine needs devices, as a list: flow.Engine(flow.cpus(2))")
        try:
            for device in devices:
                self.add(device)
            _OPEN[id(self)] = self
        except BaseException:  # no caller could close this engine, so its devices are free
            self.forget()
            raise

    def add(self, device: Device) -> None:
        """Add a device. Raises UserError if another engine has it, or if this one is closed."""
        if not isinstance(device, Device):
            raise UserError(f"{device!r} is not a device: flow.cpus(n) and flow.cuda(i) make them")
        if device.engine not in (None, self):
            raise UserError(
                f"{device.name} belongs to another engine: close that one, or make another device"
            )
        if self.closed:
            raise UserError(f"the engine is closed: {device.name} can't be added any more")
        if device.engine is None:
            device.check_process()
            self.devices.append(device)
            device.engine = self

    def lane(self, device: Device, kind: str) -> Lane:
        """Return the device's lane for a kind of work. Its workers start with its first use.

        Args:
            kind: compute, communication, fetch or call.

        Raises:
            UserError: The engine is closed, or does not have the device.
        """
        place = device, device.lane_for(kind)
        lane = self._lanes.get(place)
        if lane is None:
            self._check(device)
            new = Lane(self, device, place[1], device.workers.get(place[1], 1))
            lane = self._lanes.setdefault(place, new)  # another thread, or a handler, may have been first
        lane.start()
        return lane

    def _check(self, device: Device) -> None:
        if self.closed:
            raise UserError("the engine is closed: nothing can be pushed any more")
        if device not in self.devices:
            names = ", ".join(own.name for own in self.devices)
            raise UserError(f"{device!r} is not a device of this engine, which has {names}")

    def variable(self, name: str = "") -> Variable:
        """Return a new variable, which counts as written: a reader does not wait."""
        return Variable(name)

    def push(
        self,
        function: Callable[[], Any],
        reads: Collection[Uses] = (),
        writes: Collection[Uses] = (),
        device: Device | None = None,
        name: str = "",
        *,
        after: Sequence[Operation] = (),
        lane: str = "compute",
    ) -> Operation:
        """Run function() on a device as soon as its hazards allow, and return the operation.

        It waits for the writers of what it reads, for the readers and writers of what it writes, and for
        `after`.

        Args:
            device: Default: the engine's first.
            name: Shown in errors and traces.
            lane: The kind of work: compute, communication, fetch or call. Each has workers of its own.

        Raises:
            UserError: An argument cannot be used, or the engine is closed or does not have the device.
        """
        _check_pushed(function, reads, writes, after)
        if device is not None and not isinstance(device, Device):
            raise UserError(f"push: {device!r} is not a device: flow.cpus(n) and flow.cuda(i) make them")
        if lane not in LANES:
            raise UserError(f"push: there is no lane {lane!r}; there are {', '.join(LANES)}")
        place = self.lane(self.devices[0] if device is None else device, lane)
        operation = self.operation(function, place, name or "operation")
        operation.line = placement.user_line()
        # A worker links it later: copies, since the caller may change its lists meanwhile.
        return self.submit(operation, tuple(reads), tuple(writes), (), tuple(after))

    def operation(self, function: Callable[[], Any], lane: Lane, name: str) -> Operation:
        """Return an operation that is not submitted yet."""
        return Operation(_nothing if _dry_run.dry else function, lane, name, next(_numbers))

    def submission(
        self,
        operation: Operation,
        reads: Collection[Uses],
        writes: Collection[Uses],
        needs: Sequence[Operation] = (),
        after: Sequence[Operation] = (),
    ) -> Submission:
        """Return a submission. Besides its hazards, the operation needs and follows the given operations."""
        operation.engine = self
        return Submission(operation, reads, writes, needs, after, tuple(trace.active) if trace.active else ())

    def submit(
        self,
        operation: Operation,
        reads: Collection[Uses],
        writes: Collection[Uses],
        needs: Sequence[Operation] = (),
        after: Sequence[Operation] = (),
    ) -> Operation:
        """Submit one operation and return it."""
        submission = self.submission(operation, reads, writes, needs, after)
        self.wait_for_room(operation.number)
        graph.submit((submission,))
        if self.closed:
            self.check_open(operation.name)
        return operation

    def wait_for_room(self, number: int) -> None:
        """Block until few enough operations before this number are pending. Raises UserError if closed."""
        is_full = WORKER.lane is None and self._count_pending(number) >= self.run_ahead
        if is_full and not private.serves():
            graph.check_may_wait()
            self._wait_until(lambda: self._count_own(number) <= self._resume_at)
        if self.closed:
            raise UserError("the engine is closed: nothing can be pushed any more")

    def _count_pending(self, number: int) -> int:
        return len(self.pending) + graph.count_submitted(number)

    def _count_own(self, number: int) -> int:
        """Return the pending operations without those of other engines, whose end would not wake a waiter."""
        submitted = [s.operation for s in graph.submitted() if s.operation.number < number]
        return len(self.pending) + sum(operation.engine is self for operation in submitted)

    def check_open(self, name: str) -> None:
        """Raise UserError if the engine was closed before a worker saw a submission."""
        if self.closed:
            thread = threading.Thread(target=self._clear, name="flow closing")
            thread.start()
            thread.join()
            raise UserError(f"the engine is closed: {name} can't be pushed any more")

    def _clear(self) -> None:
        with GRAPH:
            graph.link_submitted()
            self.cancel()

    def cancel(self) -> None:
        """Cancel all operations that have not started. The caller holds GRAPH."""
        for operation in sorted(self.pending, key=lambda operation: operation.number):
            if not (operation.started or operation.done):
                operation.failure = Failure(operation, Cancelled("the engine was closed before it began"))
                operation.failure.seen = True
                for after in operation.finish():
                    after.release()

    def wait(self, variable: Uses) -> None:
        """Block until the variable is written. Raises OperationError if writing it failed."""
        if not isinstance(variable, Uses):
            raise UserError(f"wait: {variable!r} is not a variable: engine.variable(name) makes them")
        writer = graph.writer_of(variable)
        if writer is not None:
            writer.wait()

    def wait_all(self) -> None:
        """Block until nothing is pending. Raises OperationError for failures not reported yet, each once."""
        if WORKER.lane is not None:
            raise UserError(
                f"an operation on {WORKER.lane.device.name} waits for all, and so for itself: wait outside"
            )
        graph.check_may_wait()
        self._wait_until(self._idle)
        for lane in list(self._lanes.values()):
            lane.synchronize()
        unseen = sorted((f for f in self._failures if not f.seen), key=lambda failure: failure.number)
        if unseen:
            error = unseen[0].error()
            self._add_failures(error, 0)
            raise error

    def report_with(self, error: OperationError, first: int) -> None:
        """Wait for the operations from number `first` on, and report their failures in the given error."""
        for operation in list(self.pending):
            if operation.number >= first:
                operation.wait_done()
        self._add_failures(error, first)

    def _add_failures(self, error: OperationError, first: int) -> None:
        for failure in sorted(self._failures, key=lambda failure: failure.number):
            if failure.number >= first and not failure.seen:
                failure.seen = True
                error.add_note(f"also failed: {failure.text}")

    def close(self) -> None:
        """Cancel what has not started, wait for what has, and end the workers. Closing twice is harmless."""
        if WORKER.lane is not None and WORKER.lane.device.engine is self:
            raise UserError("an operation can't close the engine that runs it")
        graph.check_may_wait()
        self.closed = True  # whichever of the next calls is interrupted
        try:
            self.stop()
            for lane in list(self._lanes.values()):
                lane.close()
        finally:  # after an interrupt the devices are free, and another call waits for the rest
            for waiter in list(self._waiters):
                _release(waiter)
            for device in self.devices:
                device.engine = None if device.engine is self else device.engine
        self._lanes = {}
        _OPEN.pop(id(self), None)

    def stop(self) -> None:
        """Accept no more, and let no lane begin another operation. It does not wait."""
        self.closed = True
        for lane in list(self._lanes.values()):
            lane.stop()

    def forget(self) -> set[Operation]:
        """Close it where no worker exists, as in a forked child. Returns the operations that were pending."""
        self.closed = True
        for device in self.devices:
            device.engine = None
        pending, self.pending, self._lanes, self._failures = self.pending, set(), {}, []
        _OPEN.pop(id(self), None)
        return {operation for operation in pending if not operation.done}

    def note(self, failure: Failure) -> None:
        """Keep a failure for `wait_all`, unless it was reported. The caller holds GRAPH."""
        if not failure.seen:
            self._failures = [*(known for known in self._failures if not known.seen), failure]

    def finished(self, operation: Operation) -> None:
        """Note that an operation is done. The caller holds GRAPH."""
        self.pending.discard(operation)
        if self._waiters and len(self.pending) in (0, self._resume_at):
            for waiter in list(self._waiters):
                _release(waiter)

    def __enter__(self) -> "Engine":
        if self._scope is not None:
            raise UserError("an engine can be entered once: make another one for another `with`")
        try:
            self._scope = placement.CurrentDevice(self.devices[0])
            self._scope.__enter__()
            return self
        except BaseException:  # a signal handler's; no other caller might be able to close this engine
            if self._scope is not None:
                self._scope.close()
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._scope.close()
            if kind is None:
                self.wait_all()
        finally:
            try:
                self.close()
            finally:
                if not self.closed:  # a signal handler raised before the first line of `close`
                    self.close()

    def _idle(self) -> bool:
        queued = graph.submitted()  # read first, since an operation moves from the queue to `pending`
        return all(s.operation.engine is not self or s.operation.done for s in queued) and not self.pending

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        mine = threading.Lock()
        self._waiters.append(mine)
        try:
            while True:  # in Python 3.13 an interrupt of `while condition` skips `finally`
                if condition() or self.closed:
                    return
                graph.wake_all()
                mine.acquire(timeout=POLL_SECONDS)
        finally:
            self._waiters.remove(mine)


def _check_pushed(function: Any, reads: Any, writes: Any, after: Any) -> None:
    """Raise UserError for arguments of `push` that would fail in a worker, and end it."""
    if not callable(function):
        raise UserError(f"push: {function!r} is not a function")
    for name, given, kind, what in (
        ("reads", reads, Uses, "a variable: engine.variable(name) makes them"),
        ("writes", writes, Uses, "a variable: engine.variable(name) makes them"),
        ("after", after, Operation, "an operation: push returns them"),
    ):
        if not isinstance(given, Collection):
            raise UserError(f"push: {name} is a list, not {given!r}")
        for each in given:
            if not isinstance(each, kind):
                raise UserError(f"push: {each!r} is not {what}")


def _release(waiter: threading.Lock) -> None:
    """Wake a thread that waits for this lock, so that it checks its condition again."""
    with contextlib.suppress(RuntimeError):  # it is not waiting
        waiter.release()


def _nothing() -> None:
    """Do nothing, in place of an operation of a dry run."""


_default: list[Engine] = []  # the engine of all devices that were given to no other
_adding = threading.RLock()


def next_number() -> int:
    """Return a number that all later operations exceed."""
    return next(_numbers)


def engine_of(device: Device) -> Engine:
    """Return the device's engine. All devices that were given to no engine share one."""
    engine: Engine | None = getattr(device, "engine", None)
    if engine is None:
        with _adding:
            if not _default or _default[0].closed:
                _default[:] = [Engine([device])]
            _default[0].add(device)
            engine = _default[0]
    return engine


def _open_engines() -> list[Engine]:
    """Return all open engines. Another thread may open or close one at any time."""
    return [engine for reference in _OPEN.valuerefs() if (engine := reference()) is not None]


def set_device(device: Device) -> None:
    """Make the device this thread's current one. Raises UserError for what is no device."""
    engine_of(device)
    placement.CONTEXT.device = device


def in_dry_run() -> bool:
    """Return whether this thread is inside `dry_run`."""
    return _dry_run.dry


class dry_run(private.Scope):  # noqa: N801
    """A scope in which what this thread pushes or records is scheduled, and not executed.

    Arrays made inside never get a value. The end waits for all operations, unless an error ends the scope.
    """

    def calls(self) -> tuple[list[Any], list[Any]]:
        outer, handled = _dry_run.dry, sys.exception()
        end = [partial(setattr, _dry_run, "dry", outer), partial(_wait_unless_failed, handled)]
        return [partial(setattr, _dry_run, "dry", True)], end


def _wait_unless_failed(handled: BaseException | None) -> None:
    """Wait for all operations if this thread handles no other exception than the given one."""
    if sys.exception() is handled:
        wait_all()


def wait_all() -> None:
    """Block until nothing is pending in any engine.

    Raises:
        OperationError: An operation failed, and the failure was not reported yet.
    """
    found: OperationError | None = None
    for engine in _open_engines():
        try:
            engine.wait_all()
        except OperationError as error:  # the other engines' operations must not be pending either
            if found is None:
                found = error
            else:
                found.add_note(f"also failed: {error}")
    if found is not None:
        raise found


@atexit.register
def _close_all() -> None:
    engines = _open_engines()
    for engine in engines:  # while the first is being closed, the others must not begin operations
        engine.stop()
    for engine in engines:
        engine.close()
    graph.begin_exit()


def _reset_after_fork() -> None:
    """Close the engines in a forked child. Operations that were pending count as failed."""
    WORKER.lane = None
    _dry_run.dry = False
    _default.clear()
    _adding._at_fork_reinit()  # type: ignore[attr-defined]
    left = graph.forget()
    for submission in left:
        for variable in submission.writes:
            variable.writer = submission.operation
    pending = {submission.operation for submission in left}
    for engine in _open_engines():
        pending |= engine.forget()
    for operation in pending:
        operation.failure = Failure(operation, Cancelled("it was pending when the process was forked"))
        operation.done = True


os.register_at_fork(after_in_child=_reset_after_fork)
