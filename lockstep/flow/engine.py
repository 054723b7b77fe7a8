"""The engine: runs functions when what they read is there, on the lanes of several devices."""

import atexit
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from lockstep.errors import UserError
from lockstep.flow import trace
from lockstep.flow.devices import Device
from lockstep.flow.hazards import Uses, order
from lockstep.flow.lanes import GRAPH, HERE, LISTEN, Failure, Lane, Operation

_OPEN: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_numbers = itertools.count()  # program order, of all engines together


class _Here(threading.local):
    dry = False  # what is pushed is scheduled, not executed


_here = _Here()


class Cancelled(RuntimeError):
    """The engine was closed before the operation began."""


class Variable(Uses):
    """Something that operations read and write.

    It has no value of its own; functions know what it stands for.
    """

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name


class Engine:
    """Runs pushed functions out of order, as soon as their hazards allow, on the lanes of its devices.

    devices: each in one open engine at a time. run_ahead: `push` blocks while this many operations are
    pending. A context manager: leaving it waits for everything, or, with an error, closes at once. Arrays
    that are made inside are on its first device, if no other is set. Raises UserError for no devices, or some
    that another engine has.
    """

    def __init__(self, devices: Iterable[Device], run_ahead: int = 10_000) -> None:
        self.devices: list[Device] = []
        self.run_ahead = run_ahead
        self._resume_at = run_ahead * 3 // 4  # waking up for each operation would cost more than it
        self.closed = False
        self._lanes: dict[tuple[Device, str], Lane] = {}
        self._starting = threading.Lock()
        self._pending: set[Operation] = set()
        self._changed = threading.Condition(GRAPH)
        self._n_waiting = 0
        self._failures: list[Failure] = []
        devices = list(devices)
        if not devices:
            raise UserError("an engine needs devices: flow.Engine(flow.cpus(2))")
        if run_ahead < 1:
            raise UserError(
                f"run_ahead is the number of operations that may be pending: 1 or more, not {run_ahead}"
            )
        for device in devices:
            self.add(device)
        _OPEN.add(self)

    def add(self, device: Device) -> None:
        """One more device. Raises UserError where another engine has it."""
        if not isinstance(device, Device):
            raise UserError(f"{device!r} is not a device: flow.cpus(n) and flow.cuda(i) make them")
        if device.engine not in (None, self):
            raise UserError(
                f"{device.name} belongs to another engine: close that one, or make another device"
            )
        if device.engine is None:
            device.engine = self
            self.devices.append(device)

    def lane(self, device: Device, kind: str) -> Lane:
        """The device's lane for a kind of work, whose workers start with its first use.

        kind: compute, communication, fetch or call. Raises UserError for a device that is not the engine's.
        """
        place = device, device.lane_for(kind)
        lane = self._lanes.get(place)
        if lane is None:
            with self._starting:
                self._check(device)
                if place not in self._lanes:
                    self._lanes[place] = Lane(device, place[1], device.workers.get(place[1], 1))
                lane = self._lanes[place]
        return lane

    def _check(self, device: Device) -> None:
        if self.closed:
            raise UserError("the engine is closed: nothing can be pushed any more")
        if device not in self.devices:
            names = ", ".join(own.name for own in self.devices)
            raise UserError(f"{device!r} is not a device of this engine, which has {names}")

    def variable(self, name: str = "") -> Variable:
        """A new variable, which is there: whoever reads it before anyone writes it does not wait."""
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
        """Has function() run on a device (default: the first) when nothing pushed before stands against it.

        It waits for the writers of what it reads, for readers and writers of what it writes, and for `after`.
        Raises UserError on a closed engine or for a device that is not the engine's.
        """
        for used in (*reads, *writes):
            if not isinstance(used, Uses):
                raise UserError(f"push: {used!r} is not a variable: engine.variable(name) makes them")
        if device is not None and not isinstance(device, Device):
            raise UserError(f"push: {device!r} is not a device: flow.cpus(n) and flow.cuda(i) make them")
        place = self.lane(self.devices[0] if device is None else device, lane)
        return self.submit(self.operation(function, place, name or "operation"), reads, writes, (), after)

    def operation(self, function: Callable[[], Any], lane: Lane, name: str) -> Operation:
        """One that is not submitted yet."""
        return Operation(_nothing if _here.dry else function, lane, name, next(_numbers))

    def submit(
        self,
        operation: Operation,
        reads: Collection[Uses],
        writes: Collection[Uses],
        needs: Sequence[Operation] = (),
        after: Sequence[Operation] = (),
    ) -> Operation:
        """Lets it wait for what its variables say, and for given ones: those it needs, those it follows."""
        with GRAPH:
            self.submit_next(operation, reads, writes, needs, after)
        return operation

    def submit_next(
        self,
        operation: Operation,
        reads: Collection[Uses],
        writes: Collection[Uses],
        needs: Sequence[Operation],
        after: Sequence[Operation],
    ) -> None:
        """The same for who holds GRAPH."""
        operation.engine = self
        if len(self._pending) >= self.run_ahead and HERE.lane is None:
            self._wait_until(lambda: len(self._pending) <= self._resume_at)
        if self.closed:
            raise UserError(f"the engine is closed: {operation.name} can't be pushed any more")
        self._pending.add(operation)
        try:
            found_needs, found_follows = order(operation, reads, writes)
            found_needs += needs
            found_follows += after
            if trace.active:
                trace.note(operation, found_needs + found_follows)
            operation.link(found_needs, found_follows)
        except BaseException as error:  # Ctrl-C: nobody must wait for it for ever
            operation.failure = Failure(operation, error)
            raise
        finally:
            operation.release()

    def wait(self, variable: Uses) -> None:
        """Until the variable's value is there. Raises OperationError where it was not made."""
        if variable.writer is not None:
            variable.writer.wait()

    def wait_all(self) -> None:
        """Until nothing is pending. Raises OperationError for failures that nobody has seen, each once."""
        if HERE.lane is not None:
            raise UserError(
                f"an operation on {HERE.lane.device.name} waits for all, and so for itself: wait outside"
            )
        with GRAPH:
            self._wait_until(lambda: not self._pending)
            unseen = sorted((f for f in self._failures if not f.seen), key=lambda failure: failure.number)
            self._failures = []
        for lane in list(self._lanes.values()):
            lane.synchronize()
        if unseen:
            error = unseen[0].error()
            for failure in unseen[1:]:
                failure.seen = True
                error.add_note(f"also failed: {failure.text}")
            raise error

    def close(self) -> None:
        """Cancels what has not begun, waits for what has, and ends the workers. Closing twice is harmless."""
        if HERE.lane is not None and HERE.lane.device.engine is self:
            raise UserError("an operation can't close the engine that runs it")
        with GRAPH:
            self.closed = True
            for operation in sorted(self._pending, key=lambda operation: operation.number):
                if not (operation.started or operation.done):
                    operation.failure = Failure(operation, Cancelled("the engine was closed before it began"))
                    operation.failure.seen = True
                    for after in operation.finish():
                        after.release()
            self._changed.notify_all()
        with self._starting:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        for device in self.devices:
            device.engine = None
        self._lanes = {}
        _OPEN.discard(self)

    def finished(self, operation: Operation) -> None:
        """What an operation tells when it is done. Holds GRAPH."""
        self._pending.discard(operation)
        failure = operation.failure
        if failure is not None and failure.number == operation.number and not failure.seen:
            self._failures = [*(known for known in self._failures if not known.seen), failure]
        n_pending = len(self._pending)
        if self._n_waiting and n_pending in (0, self._resume_at):
            self._changed.notify_all()

    def __enter__(self) -> "Engine":
        from lockstep.flow import placement

        placement.enter(self.devices[0])
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        from lockstep.flow import placement

        placement.leave()
        try:
            if kind is None:
                self.wait_all()
        finally:
            self.close()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Holds GRAPH."""
        self._n_waiting += 1
        try:
            while not (condition() or self.closed):
                self._changed.wait(LISTEN)
        finally:
            self._n_waiting -= 1


def _nothing() -> None:
    """What an operation of a dry run does."""


def in_dry_run() -> bool:
    return _here.dry


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """What this thread pushes or records inside is scheduled, not executed;

    arrays made so never get a value.
    """
    _here.dry = True
    try:
        yield
        wait_all()
    finally:
        _here.dry = False


def wait_all() -> None:
    """Until nothing is pending in any engine.

    Raises OperationError for failures that nobody has seen, each once.
    """
    for engine in list(_OPEN):
        engine.wait_all()


@atexit.register
def _close_all() -> None:
    for engine in list(_OPEN):
        engine.close()
