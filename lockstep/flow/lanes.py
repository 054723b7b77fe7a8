"""Lanes: where operations run. Each has a heap of what is ready, in program order, and a worker for it.

One lock, GRAPH, guards all that says who waits for whom, in every engine: an operation of one can wait for
one of another.
"""

import contextlib
import heapq
import threading
import traceback
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.flow.devices import Device, Event

GRAPH = threading.Lock()
# Seconds of one wait, of which there are as many as it takes: Python's handler of a signal that came just
# before, or to another thread, runs between two of them.
LISTEN = 0.2


class _Here(threading.local):
    lane: "Lane | None" = None  # of which this thread is a worker


HERE = _Here()


class OperationError(RuntimeError):
    """An operation failed; the message names it, its device and the user's line, `__cause__` says why."""


class Failure:
    """What went wrong in one operation, for all who need what it did not make."""

    def __init__(self, operation: "Operation", cause: BaseException) -> None:
        self.number, self.cause, self.seen = operation.number, cause, False
        place = f", recorded at {operation.line}" if operation.line else ""
        what = f"{type(cause).__name__}: {cause}"
        self.text = f"{operation.name} on {operation.lane.device.name}{place}: {what}"
        self._lines = "".join(traceback.format_tb(cause.__traceback__)[1:])
        link: BaseException | None = cause
        while link is not None:  # frames hold what the operation used; the lines say as much
            link.__traceback__, link = None, link.__context__

    def error(self) -> OperationError:
        """A new error each time, since whoever raises one adds to its traceback."""
        self.seen = True
        error = OperationError(self.text)
        error.__cause__ = self.cause
        if self._lines:
            error.add_note(f"In the operation:\n{self._lines}")
        return error


class Operation:
    """A function that runs once, on a lane, when all it waits for has finished."""

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
        self.record: Any = None  # of the trace
        self._missing = 1  # its own submission
        self._needed_by: list[Operation] = []
        self._followed_by: list[Operation] = []
        self._awaits: list[Operation] = []  # those whose events it follows
        self.event: Event | None = None  # when it was launched and may not have run
        self._waiters: list[threading.Lock] | None = None

    def __repr__(self) -> str:
        return f"<operation {self.number}: {self.name} on {self.lane.name}>"

    def wait(self) -> Any:
        """What the function returned, once it has run. Raises OperationError where it, or its input, failed.

        Raises UserError inside an operation of the same device, which would wait for itself.
        """
        if not self.done:
            self._wait()
        if self.event is not None:
            self.event.synchronize()
        if self.failure is not None:
            raise self.failure.error()
        return self.result_value

    result = wait

    def _wait(self) -> None:
        if HERE.lane is not None and HERE.lane.device is self.lane.device:
            raise UserError(
                f"an operation on {self.lane.device.name} waits for {self.name} on the same device, which "
                "may be behind it: wait outside, or hand the value over as one of the operation's inputs"
            )
        mine = threading.Lock()
        mine.acquire()
        with GRAPH:
            if self.done:
                return
            self._waiters = [*(self._waiters or ()), mine]
        while not mine.acquire(timeout=LISTEN):
            pass  # a signal's handler runs and may raise

    def link(self, needs: list["Operation"], follows: list["Operation"]) -> None:
        """Makes it wait for those that have not finished. Holds GRAPH."""
        after: list[Operation] = []
        for before in needs:
            if before.lane.asynchronous and awaits(self, before):
                after.append(before)
            if not before.done:
                before._needed_by.append(self)
                self._missing += 1
            elif before.failure is not None:
                self._inherit(before.failure)
        for before in follows:
            if before.lane.asynchronous and awaits(self, before):
                after.append(before)
            if not before.done:
                before._followed_by.append(self)
                self._missing += 1
        self._awaits = after

    def _inherit(self, failure: Failure) -> None:
        """Of several the first in program order, whatever failed first."""
        if self.failure is None or failure.number < self.failure.number:
            self.failure = failure

    def release(self) -> None:
        """One of those that it waits for has finished. Holds GRAPH."""
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
        """Marks it done and returns those that wait for one less now. Holds GRAPH."""
        self.done, self.function = True, None
        if self.failure is not None:
            for after in self._needed_by:
                after._inherit(self.failure)
        released = self._needed_by + self._followed_by
        self._needed_by, self._followed_by = [], []
        for waiter in self._waiters or ():
            waiter.release()
        self._waiters = None
        self.engine.finished(self)
        return released

    def run(self) -> None:
        """In its lane's worker.

        It lets go of function and inputs, so that their memory is warm for the next.
        """
        function, self.function = self.function, None
        assert function is not None
        record = self.record
        if record is not None:
            record.start = perf_counter()
        device = self.lane.device
        try:
            if self._awaits:
                self._follow_events()
            self.result_value = device.launch(function)
            self.event = device.mark()
            if self.event is not None:
                self.lane.last_events[threading.get_ident()] = self.event
        except BaseException as error:
            self.failure = Failure(self, error)
        function = None  # a frame that an error refers to would keep it
        if record is not None:
            record.stop = perf_counter()

    def _follow_events(self) -> None:
        before, self._awaits = self._awaits, []
        for event in (operation.event for operation in before):
            if event is None:
                continue
            if _Chosen.waiting == "host":
                event.synchronize()
            else:
                self.lane.device.follow(event)

    @property
    def settled(self) -> bool:
        """Whether it has run, not only been launched."""
        return self.done and (self.event is None or self.event.query())


Waiting = Literal["events", "host"]


class _Chosen:
    waiting: Waiting = "events"


def waiting(how: Waiting) -> None:
    """How lanes of asynchronous devices wait for each other from now on.

    'events': the device waits, the host goes on. 'host': the worker waits before it launches, which is slower
    and easier to follow in a debugger. Raises UserError for anything else.
    """
    if how not in get_args(Waiting):
        raise UserError(f"flow.waiting takes {' or '.join(get_args(Waiting))}, not {how!r}")
    _Chosen.waiting = how


def awaits(operation: Operation, before: Operation) -> bool:
    """Whether an event must come behind the first, which is asynchronous: no stream has both."""
    return before.lane is not operation.lane or before.lane.n_workers > 1


class Lane:
    """A queue of one device: what is ready runs in program order, whatever was pushed before it."""

    def __init__(self, device: "Device", kind: str, n_workers: int) -> None:
        self.device, self.kind, self.name = device, kind, f"{device.name} {kind}"
        self._heap: list[tuple[int, Operation]] = []
        self._ready = threading.Condition(GRAPH)
        self._n_idle = 0
        self._closing = False
        self.n_workers = n_workers
        self.last_events: dict[int, Event] = {}  # by worker
        self.asynchronous = device.asynchronous
        self._workers = [
            threading.Thread(target=self._work, name=f"flow {self.name}", daemon=True)
            for _ in range(n_workers)
        ]
        for worker in self._workers:
            worker.start()

    def put(self, operation: Operation) -> None:
        """Holds GRAPH."""
        heapq.heappush(self._heap, (operation.number, operation))
        if self._n_idle:
            self._ready.notify()

    def synchronize(self) -> None:
        """Returns when what was launched has run."""
        for event in list(self.last_events.values()):
            event.synchronize()

    def close(self) -> None:
        """Ends the workers, once what runs has run."""
        with GRAPH:
            self._closing = True
            self._ready.notify_all()
        for worker in self._workers:
            while worker.is_alive():
                worker.join(LISTEN)

    def _work(self) -> None:
        HERE.lane = self
        with contextlib.ExitStack() as stack:
            self.device.enter(self.kind, stack)
            with GRAPH:
                while (operation := self._next()) is not None:
                    operation.started = True
                    GRAPH.release()
                    try:
                        operation.run()
                    finally:
                        GRAPH.acquire()
                    for after in operation.finish():
                        after.release()
                    del operation
            self.synchronize()

    def _next(self) -> Operation | None:
        while True:
            while self._heap:
                operation = heapq.heappop(self._heap)[1]
                if not operation.done:  # it may have been cancelled
                    return operation
            if self._closing:
                return None
            self._n_idle += 1
            self._ready.wait()
            self._n_idle -= 1
