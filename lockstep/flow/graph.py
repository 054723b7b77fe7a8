"""The graph of pending operations: which operation waits for which, and how an operation enters it.

Edges follow from what operations read and write. The three kinds of hazard (Hennessy and Patterson,
"Computer Architecture", section 3.1) are one function each; the engine and programs use them.

A Python signal handler runs in the main thread between any two of its instructions, may raise there, and
may use flow itself. So no user thread ever changes the graph. It hands a submission over with one append,
which is indivisible; a lane's worker, which no handler interrupts, links it to the others. Before the append
an operation does not exist; after it, the operation runs whatever happens to the thread that made it.
"""

import contextlib
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.flow import private

# Only workers and threads of this package hold it. It guards the graphs of all engines, since operations of
# different engines can wait for each other.
GRAPH = threading.RLock()
_FEW = 16  # readers that are kept without looking whether they have finished


class Uses:
    """The writer of a variable's present value, and that value's readers.

    Attributes:
        version: Number of the newest operation that was submitted to write it; -1 if none was.
    """

    __slots__ = ("_look_at", "readers", "version", "writer")

    def __init__(self) -> None:
        self.writer: Any = None
        self.readers: list[Any] = []
        self.version = -1
        self._look_at = _FEW

    def add_reader(self, operation: Any) -> None:
        """Add a reader, and drop readers that have finished, so that a constant's do not accumulate."""
        if len(self.readers) >= self._look_at:
            self.readers = [reader for reader in self.readers if not reader.settled]
            self._look_at = max(_FEW, 2 * len(self.readers))
        self.readers.append(operation)


def read_after_write(uses: Uses) -> list[Any]:
    """Return the operations that must finish before the value can be read."""
    return [] if uses.writer is None else [uses.writer]


def write_after_read(uses: Uses) -> list[Any]:
    """Return the operations that must read the old value before a new one is written."""
    return uses.readers


def write_after_write(uses: Uses) -> list[Any]:
    """Return the operations that must write the old value before a new one is written."""
    return [] if uses.writer is None else [uses.writer]


def order(operation: Any, reads: Iterable[Uses], writes: Iterable[Uses]) -> tuple[list[Any], list[Any]]:
    """Add an operation's uses; return the operations whose values it needs, and those it only follows.

    A failure spreads to operations that need the failed one, not to those that follow it. An operation can
    be in both lists, and more than once.
    """
    needs: list[Any] = []
    follows: list[Any] = []
    for uses in reads:
        needs += read_after_write(uses)
    for uses in writes:
        follows += write_after_read(uses)
        follows += write_after_write(uses)
    for uses in reads:
        uses.add_reader(operation)
    for uses in writes:
        uses.writer, uses.readers = operation, []
    return needs, follows


class Submission(NamedTuple):
    """An operation on its way into the graph.

    Attributes:
        needs: Operations whose failure is its failure.
        after: Operations that it follows, whether they fail or not.
    """

    operation: Any
    reads: Collection[Uses]
    writes: Collection[Uses]
    needs: Sequence[Any]
    after: Sequence[Any]
    traces: Sequence[Any]


class _Progress:
    """The state of all submissions.

    Attributes:
        linked: The highest number of an operation that is in the graph.
        at_exit: Whether Python's exit has closed all engines; it does not close those that are made later.
    """

    linked = -1
    at_exit = False


_submitted: deque[Sequence[Submission]] = deque()


def submit(batch: Sequence[Submission], counted: Callable[[], None] | None = None) -> None:
    """Submit operations to be linked one after another, with no other thread's in between.

    `counted`, a C function, is called in the same step.

    The versions change in the same step. In between, a signal handler or another thread would copy the old
    value to another device as the new version.
    """
    versions = [
        partial(setattr, uses, "version", submission.operation.number)
        for submission in batch
        for uses in submission.writes
    ]
    count = [] if counted is None else [counted]
    private.call_all([*versions, *count, partial(_submitted.append, batch)])
    _wake(batch)
    if _Progress.at_exit:  # an earlier atexit handler: Python must not end while a worker is inside of torch
        with contextlib.suppress(UserError):  # a worker does not wait
            for submission in batch:
                submission.operation.wait_done()


def begin_exit() -> None:
    """Let each submission wait until it is done, from now on."""
    _Progress.at_exit = True


def _wake(batch: Sequence[Submission]) -> None:
    """Wake one idle worker, which links everything."""
    for submission in batch:
        if submission.operation.lane.wake():
            return


def wake_all() -> None:
    """Wake workers for all submissions; a submitting thread may have been interrupted before it did."""
    for batch in list(_submitted):
        _wake(batch)


def any_submitted() -> bool:
    """Return whether submissions wait to be linked."""
    return bool(_submitted)


def submitted() -> list[Submission]:
    """Return everything that may not be linked yet, in the order of submission."""
    return [submission for batch in list(_submitted) for submission in batch]


def count_submitted(number: int) -> int:
    """Return an upper bound of the operations before this number that are not linked yet."""
    return max(0, number - _Progress.linked - 1) if _submitted else 0


def writer_of(uses: Uses) -> Any:
    """Return the newest operation that writes a variable, or None."""
    for submission in reversed(submitted()):
        if any(uses is each for each in submission.writes):
            return submission.operation
    return uses.writer


def link_submitted() -> None:
    """Link all submissions. The caller is a worker and holds GRAPH.

    A batch leaves the queue last, so an operation is always in the queue, in the graph, or in both.
    """
    while _submitted:
        for submission in _submitted[0]:
            _link(submission)
        _submitted.popleft()


def _link(submission: Submission) -> None:
    operation, reads, writes, needs, after, traces = submission
    operation.engine.pending.add(operation)
    _Progress.linked = max(_Progress.linked, operation.number)
    try:
        found_needs, found_follows = order(operation, reads, writes)
        found_needs += needs
        found_follows += after
        for each in traces:
            operation.record_in(each, found_needs + found_follows)
        operation.link(found_needs, found_follows)
    except BaseException as error:  # out of memory: an operation that waits for it must not wait for ever
        operation.fail(error)
    operation.release()


WAITS: dict[Any, Any] = {}  # by an operation that runs: the one for which its worker waits


def is_stuck(running: Any, awaited: Any) -> bool:
    """Let a worker, which runs an operation, begin to wait for another one, unless that waits for it."""
    with GRAPH:  # the loops are in a function: in Python 3.13 an interrupt can skip the end of a `with`
        # A copy, which is one step: workers that end their wait change the original.
        stuck = awaited in _behind(running, {**WAITS, running: awaited})
        if not stuck:
            WAITS[running] = awaited
        return stuck


def _behind(running: Any, waits: dict[Any, Any]) -> set[Any]:
    """Return what can't be done before an operation that runs. The caller holds GRAPH.

    These are the operations that wait for it, those whose workers wait for one of these, and the others of
    a lane whose workers all wait.
    """
    link_submitted()
    n_waiting = Counter(each.lane for each, awaited in waits.items() if not awaited.done)
    seen, found = set[Any](), [running]
    while found:
        before = found.pop()
        if before in seen:
            continue
        seen.add(before)
        found += before._needed_by + before._followed_by
        found += [waiting for waiting, awaited in waits.items() if awaited is before]
        if before in waits and n_waiting[before.lane] == before.lane.n_workers:
            found += [own for own in list(before.lane.engine.pending) if own.lane is before.lane]
    return seen


def check_may_wait(in_finalizer: bool = False) -> None:
    """Raise UserError in a finalizer that interrupts a worker or the predictor, or at Python's end.

    Args:
        in_finalizer: Whether this is known to be one; otherwise it is if the worker changes the graph.
    """
    check_not_ending()
    if in_finalizer or private.serves() or GRAPH._is_owned():  # type: ignore[attr-defined]
        raise UserError(
            "a finalizer (__del__, weakref callback) in a worker of the engine waits for the engine: it can "
            "push operations, but not wait for them"
        )


def check_not_ending() -> None:
    """Raise UserError if Python is ending: its finalizers still run, but no thread does."""
    if sys.is_finalizing():
        raise UserError(
            "Python is ending, and a finalizer (__del__, weakref callback) uses arrays or the engine: no "
            "operation can run any more; call flow.wait_all() and drop the object before the program ends"
        )


def forget() -> list[Submission]:
    """Empty the queue in a forked child, which has no workers, and return what was in it."""
    GRAPH._at_fork_reinit()  # type: ignore[attr-defined]
    left = submitted()
    _submitted.clear()
    return left
