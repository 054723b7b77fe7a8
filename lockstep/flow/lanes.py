"""Lanes: where operations run. Each has a heap of ready operations, in program order, and its workers."""

import _thread
import contextlib
import gc
import heapq
import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal, get_args

from lockstep.errors import UserError
from lockstep.flow import graph, private
from lockstep.flow.devices import Device, Event
from lockstep.flow.graph import GRAPH
from lockstep.flow.trace import Trace, TracedOperation

# A long wait consists of waits of this length: Python's handler of a signal that arrived just before, or in
# another thread, runs between two of them.
POLL_SECONDS = 0.2


class _WorkerContext(threading.local):
    """The state of a thread that may be a worker.

    Attributes:
        lane: The lane that it works for, or None outside of workers.
        running: The operation that it runs.
        drops: Whether it drops what an operation has kept, whose finalizers run then.
        start: The report of gc at the start of its newest garbage collection.
    """

    lane: "Lane | None" = None
    running: "Operation | None" = None
    drops = False
    start: Any = None


WORKER = _WorkerContext()
# gc calls these at the start and the stop of each collection. They are C functions, since gc would swallow
# what a signal handler raises in a function of Python.
_phases, _newest = OrderedDict[str, None](start=None, stop=None), SimpleNamespace(start=None)
gc.callbacks += [_phases.move_to_end, partial(setattr, _newest), partial(setattr, WORKER)]  # type: ignore[list-item]


def _in_finalizer() -> bool:
    """Return whether this thread is a worker that collects garbage, or drops what an operation has kept."""
    collects = list(_phases)[-1] == "start" and WORKER.start is _newest.start  # `list` is one step
    return WORKER.lane is not None and (WORKER.drops or collects or WORKER.running is None)


class OperationError(RuntimeError):
    """An operation failed. The message names it and its line; `__cause__` is the reason."""


class Failure:
    """The failure of an operation, for all operations that need its result."""

    def __init__(self, operation: "Operation", cause: BaseException) -> None:
        self.number, self.cause, self.seen = operation.number, cause, False
        place = f", recorded at {operation.line}" if operation.line else ""
        what = f"{type(cause).__name__}: {_text_of(cause)}"
        self.text = f"{operation.name} on {operation.lane.device.name}{place}: {what}"
        self._lines = "".join(traceback.format_tb(cause.__traceback__)[1:])
        link: BaseException | None = cause
        # Frames would keep the operation's values; the lines suffice. A chain may be a cycle.
        while link is not None and link.__traceback__ is not None:
            BaseException.with_traceback(link, None)  # also of a frozen dataclass, which refuses assignments
            link = link.__context__

    def error(self) -> OperationError:
        """Return a new error each time, since raising one adds to its traceback."""
        self.seen = True
        error = OperationError(self.text)
        error.__cause__ = self.cause
        if self._lines:
            error.add_note(f"In the operation:\n{self._lines}")
        return error


def _text_of(error: BaseException) -> str:
    """Return an error's text, whose making may fail: a worker must not end with that second error."""
    try:
        return str(error)
    except BaseException as second:
        return f"(making its text fails: {type(second).__name__})"


class Operation:
    """A function that runs once, on a lane, when all operations that it waits for are done."""

    __slots__ = (
        "__weakref__", "_awaits", "_followed_by", "_missing", "_needed_by", "_waiters", "done", "engine",
        "event", "failure", "function", "lane", "line", "name", "number", "phase", "record",
        "result_value", "started",
    )  # fmt: skip

    def __init__(self, function: Callable[[], Any], lane: "Lane", name: str, number: int) -> None:
        self.function: Callable[[], Any] | None = function
        self.lane, self.name, self.number = lane, name, number
        self.engine: Any = None
        self.line, self.phase = "", "forward"
        self.done = self.started = False
        self.failure: Failure | None = None
        self.result_value: Any = None
        self.record: TracedOperation | None = None  # all traces share it
        self._missing = 1  # its own submission
        self._needed_by: list[Operation] = []
        self._followed_by: list[Operation] = []
        self._awaits: list[Operation] = []  # operations whose events it follows
        self.event: Event | None = None  # set if it was launched and may not have run
        self._waiters: list[threading.Lock] = []

    def __repr__(self) -> str:
        return f"<operation {self.number}: {self.name} on {self.lane.name}>"

    def wait(self) -> Any:
        """Block until the function has run, and return its result.

        Raises:
            OperationError: The operation, or one that it needs, failed.
            UserError: The caller is an operation of the same device, which would wait for itself.
        """
        self.wait_done()
        if self.failure is not None:
            raise self.failure.error()
        return self.result_value

    result = wait

    def wait_done(self) -> None:
        """Block until the function has run or failed."""
        if not self.done:
            self._wait()
        if self.event is not None:
            self.event.synchronize()

    def take(self) -> Any:
        """Wait for the result, return it and release it: later operations may keep this one in memory."""
        result = self.wait()
        self.result_value = None
        return result

    def _wait(self) -> None:
        lane = WORKER.lane
        same = lane is not None and lane.device is self.lane.device
        if not same:
            graph.check_may_wait(_in_finalizer())
        if lane is None:
            self._block()
            return
        running = WORKER.running
        if same or running is None or graph.is_stuck(running, self):
            raise UserError(
                f"an operation on {lane.device.name} waits for {self.name} on "
                f"{'the same device' if same else self.lane.device.name}, which may be behind it: "
                "wait outside, or hand the value over as one of the operation's inputs"
            )
        try:
            self._block()
        finally:
            del graph.WAITS[running]

    def _block(self) -> None:
        mine = threading.Lock()
        mine.acquire()
        self._waiters.append(mine)  # before it reads `done`; `finish` sets `done` before it reads the waiters
        while not self.done:
            graph.wake_all()
            mine.acquire(timeout=POLL_SECONDS)  # a signal's handler runs after it, and may raise

    def link(self, needs: list["Operation"], follows: list["Operation"]) -> None:
        """Make it wait for those of the given operations that are not done. The caller holds GRAPH."""
        self._awaits = [one for one in (*needs, *follows) if one.lane.asynchronous or one._awaits]
        for before in needs:
            if not before.done:
                before._needed_by.append(self)
                self._missing += 1
            elif before.failure is not None:
                self._inherit(before.failure)
        for before in follows:
            if not before.done:
                before._followed_by.append(self)
                self._missing += 1

    def _inherit(self, failure: Failure) -> None:
        """Take over a failure. Of several, the first in program order counts, whichever failed first."""
        if self.failure is None or failure.number < self.failure.number:
            self.failure = failure

    def fail(self, cause: BaseException) -> None:
        """Record the reason why it cannot run, or why it failed."""
        try:
            self.failure = Failure(self, cause)
        except BaseException as second:  # no worker may end with it
            what = f"its error cannot be described: {type(second).__name__}: {_text_of(second)}"
            self.failure = Failure(self, RuntimeError(what))

    def record_in(self, trace: Trace, before: Sequence["Operation"]) -> None:
        """Add it to a trace, as pushed behind other operations."""
        numbers = sorted({other.number for other in before if other is not self})
        place = self.lane.device.name, trace.label(self.lane)
        if self.record is None:
            self.record = TracedOperation(self.number, self.name, *place, self.phase, self.line, numbers)
        trace.pushed.append(self.record)

    def release(self) -> None:
        """Count one operation less that it waits for. The caller holds GRAPH."""
        stack = [self]
        while stack:
            operation = stack.pop()
            operation._missing -= 1
            if operation._missing or operation.done:
                continue
            if operation.failure is None:
                operation.lane.put(operation)
            else:
                stack += operation.finish()

    def finish(self) -> list["Operation"]:
        """Mark it done, and return the operations that wait for it. The caller holds GRAPH."""
        if self.failure is not None and self.failure.number == self.number:
            self.engine.note(self.failure)  # first: a thread that sees it done looks for failures
        if self._awaits:  # it has not run: what comes behind it follows these in its place
            with contextlib.suppress(Exception):  # asking a device that has failed
                self._awaits = [one for one in self._launched() if not one.settled]
        self.done, self.function = True, None
        if self.failure is not None:
            for after in self._needed_by:
                after._inherit(self.failure)
        released = self._needed_by + self._followed_by
        self._needed_by, self._followed_by = [], []
        for waiter in self._waiters:
            waiter.release()
        self.engine.finished(self)
        return released

    def run(self) -> None:
        """Run the function, in a worker of its lane.

        The function and its inputs are released at once, so that their memory is warm for the next
        operation.
        """
        function, self.function = self.function, None
        assert function is not None
        record = self.record
        if record is not None:
            record.start = perf_counter()
        device = self.lane.device
        WORKER.running = self
        try:
            if self.lane.error is not None:
                raise self.lane.error
            if self._awaits:
                self._follow_events()
            self.result_value = device.launch(function)
            self._mark()
        except BaseException as error:
            self.fail(error)
            with contextlib.suppress(Exception):  # the device may have failed, too
                self._mark()  # what it has launched before the error runs
        WORKER.running, WORKER.drops = None, True
        function = None  # a frame that an error refers to would keep it
        WORKER.drops = False
        if record is not None:
            record.stop = perf_counter()

    def _mark(self) -> None:
        self.event = self.lane.device.mark()
        if self.event is not None:
            self.lane.last_events[threading.get_ident()] = self.event

    def _launched(self) -> "dict[Operation, None]":
        """Return the operations whose events it follows, also those behind operations that have not run."""
        return dict.fromkeys(one for before in self._awaits for one in (before, *before._awaits))

    def _follow_events(self) -> None:
        before, self._awaits = self._launched(), []
        for event in (operation.event for operation in before if awaits(self, operation)):
            if event is None:
                continue
            if _Settings.waiting == "host":
                event.synchronize()
            else:
                self.lane.device.follow(event)

    @property
    def settled(self) -> bool:
        """True once it has run; a launched operation may still be pending on its device."""
        return self.done and (self.event is None or self.event.query())


Waiting = Literal["events", "host"]


class _Settings:
    """The process-wide setting of how lanes of asynchronous devices wait for each other."""

    waiting: Waiting = "events"


def waiting(how: Waiting) -> None:
    """Set how lanes of asynchronous devices wait for each other from now on.

    Args:
        how: With 'events', the device waits and the host continues. With 'host', the worker waits before it
            launches, which is slower and easier to follow in a debugger.

    Raises:
        UserError: `how` is something else.
    """
    if how not in get_args(Waiting):
        raise UserError(f"flow.waiting takes {' or '.join(get_args(Waiting))}, not {how!r}")
    _Settings.waiting = how


def awaits(operation: Operation, before: Operation) -> bool:
    """Return whether the operation must wait for an event of the asynchronous one before it."""
    return before.lane is not operation.lane or before.lane.n_workers > 1


class Lane:
    """A queue of one device. Ready operations run in program order, not in the order of submission."""

    def __init__(self, engine: Any, device: Device, kind: str, n_workers: int) -> None:
        self.device, self.kind, self.name = device, kind, f"{device.name} {kind}"
        self.engine = engine
        self._heap: list[tuple[int, Operation]] = []
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._n_idle = 0
        self._closing = self._started = False
        self.n_workers = n_workers
        self.last_events: dict[int, Event] = {}  # by worker
        self.asynchronous = device.asynchronous
        self.error: Exception | None = None  # why a worker could not begin: all operations fail with it
        self._places = [None] * n_workers  # one per worker that has not begun
        self._workers: list[threading.Thread] = []
        self._working: list[None] = []  # one per worker that has not ended

    def start(self) -> None:
        """Start the workers. After an interrupt it is called again; surplus workers end at once."""
        if self._started:
            return
        graph.check_not_ending()
        for _ in range(self.n_workers):
            _thread.start_new_thread(self._start_worker, ())
        self._started = True

    def _start_worker(self) -> None:
        """Start a worker, in a thread where no signal handler can break Thread.start.

        No garbage is collected until the new thread counts as a worker: a finalizer in it might wait for an
        operation that this worker is to run.
        """
        pause, resume = private.pausing()
        private.call_all(pause)
        try:
            worker = threading.Thread(
                target=self._work, args=(resume,), name=f"flow {self.name}", daemon=True
            )
            self._workers.append(worker)
            worker.start()
        except BaseException:  # the system has no second thread: this one is the worker
            self._work(resume)

    def put(self, operation: Operation) -> None:
        """Add a ready operation. The caller holds GRAPH."""
        heapq.heappush(self._heap, (operation.number, operation))
        self.wake()

    def wake(self) -> bool:
        """Wake an idle worker, and return whether one exists."""
        if not self._n_idle:
            return False
        if self._wakes.qsize() < self._n_idle:
            self._wakes.put(None)
        return True

    def synchronize(self) -> None:
        """Block until everything launched has run."""
        for event in list(self.last_events.values()):
            event.synchronize()

    def stop(self) -> None:
        """Let no worker begin another operation. Idle ones wake up, and cancel what has not started."""
        self._closing = True
        for _ in range(self.n_workers):
            self._wakes.put(None)

    def close(self) -> None:
        """End the workers, after their present operation."""
        self.stop()
        while self._started and self._places:  # workers that are being started
            time.sleep(1e-3)
        while self._working:  # a `join` that is interrupted would count its thread as ended (Python 3.11)
            time.sleep(1e-3)
        for worker in self._workers:
            if worker.is_alive():
                worker.join()

    def _work(self, resume: Sequence[Callable[[], Any]]) -> None:
        self._working.append(None)
        WORKER.lane = self
        private.call_all(resume)
        try:
            if self._take_place():
                self._run_operations()
        finally:
            self._working.pop()

    def _take_place(self) -> bool:
        """Return whether this worker is needed, and not one of too many."""
        try:
            self._places.pop()
        except IndexError:
            return False
        return True

    def _run_operations(self) -> None:
        """Run operations until the lane is closed."""
        with contextlib.ExitStack() as stack:
            self._enter_device(stack)
            operation: Operation | None = None
            closing = False
            while not closing or operation is not None:
                if operation is not None:
                    operation.run()
                with GRAPH:
                    if operation is not None:
                        for after in operation.finish():
                            after.release()
                        del operation  # an idle worker must not keep the result
                    closing = self._closing
                    operation = self._take()
                    self._n_idle += operation is None
                if operation is None:
                    self._rest(closing)
            self.synchronize()

    def _enter_device(self, stack: contextlib.ExitStack) -> None:
        """Prepare this worker. After a failure it keeps running, and fails the lane's operations."""
        try:
            self.device.enter(self.kind, stack)
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            self.error = RuntimeError(f"a worker of {self.name} can't begin: {what}")
            self.error.__cause__ = error

    def _take(self) -> Operation | None:
        """Return the next operation to run, or None. The caller holds GRAPH."""
        graph.link_submitted()
        if self._closing:
            self.engine.cancel()
        while self._heap:
            operation = heapq.heappop(self._heap)[1]
            if not operation.done:  # it may have been cancelled
                operation.started = True
                return operation
        return None

    def _rest(self, closing: bool) -> None:
        """Wait for work. The worker counts as idle, so that a submission wakes it."""
        if not (closing or graph.any_submitted()):
            self._wakes.get()
        with GRAPH:
            self._n_idle -= 1
