"""What ran where and when, and what it waited for."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.flow import picture, schedule

if TYPE_CHECKING:
    from lockstep.flow.lanes import Operation


@dataclass
class TracedOperation:
    """One operation. start, stop: seconds of time.perf_counter(). waited_for: numbers of others.

    phase: forward, backward, update, merge, copy, fetch or call.
    """

    number: int
    name: str
    device: str
    lane: str
    phase: str
    line: str
    waited_for: list[int]
    start: float = 0.0
    stop: float = 0.0

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass
class Trace:
    """The operations that were pushed while it was recorded."""

    noted: list[TracedOperation] = field(default_factory=list)

    @property
    def operations(self) -> list[TracedOperation]:
        """Those that have run, in program order."""
        return sorted((each for each in self.noted if each.stop), key=lambda each: each.number)

    def save(self, path: str | Path) -> None:
        """Writes .json for Chrome and Perfetto, .html as a page of its own, or .dot for Graphviz.

        Raises UserError for another suffix, and where the file can't be written.
        """
        path = Path(path)
        writers = {".json": self._chrome, ".html": self._page, ".dot": self._dot}
        if path.suffix not in writers:
            raise UserError(
                f"{path}: a trace is saved as {', '.join(writers)}, not {path.suffix or 'without a suffix'}"
            )
        text = writers[path.suffix]()
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: the trace can't be saved here: {error.strerror}") from error

    def summary(self) -> str:
        """Busy share of each lane, the critical path, and what a list schedule of these durations reaches."""
        operations = self.operations
        if not operations:
            return "nothing was recorded"
        span = max(o.stop for o in operations) - min(o.start for o in operations)
        tasks = self.tasks()
        lines = [f"{len(operations)} operations in {span * 1e3:.2f} ms"]
        for lane in dict.fromkeys(o.lane for o in operations):
            busy = sum(o.seconds for o in operations if o.lane == lane)
            lines.append(f"{lane}: busy {busy / span if span else 0:.0%}")
        seconds, path = schedule.critical_path(tasks)
        names = [o.name for o in operations if o.number in set(path)]
        shown = names if len(names) <= 8 else [*names[:4], "...", *names[-4:]]
        lines.append(f"critical path: {seconds * 1e3:.2f} ms in {len(path)} operations: {' > '.join(shown)}")
        ideal = schedule.list_schedule(tasks)
        lines.append(
            f"a list schedule of these durations: {ideal * 1e3:.2f} ms, "
            f"{ideal / span if span else 1:.0%} of the time taken"
        )
        return "\n".join(lines)

    def tasks(self) -> dict[int, schedule.Task]:
        """For `schedule`."""
        return {o.number: schedule.Task(o.lane, o.seconds, o.waited_for) for o in self.operations}

    def _chrome(self) -> str:
        lanes = list(dict.fromkeys(o.lane for o in self.operations))
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": n, "args": {"name": lane}}
            for n, lane in enumerate(lanes)
        ]
        by_number = {o.number: o for o in self.operations}
        for o in self.operations:
            place = {"pid": 0, "tid": lanes.index(o.lane)}
            arguments = {"number": o.number, "line": o.line, "waited for": o.waited_for}
            event = {"name": o.name, "cat": o.phase, "ph": "X", "ts": o.start * 1e6, "dur": o.seconds * 1e6}
            rows.append({**event, **place, "args": arguments})
            for before in (by_number[n] for n in o.waited_for if n in by_number):
                arrow = {"name": "waits", "cat": "edge", "id": f"{before.number}-{o.number}", "pid": 0}
                rows.append({**arrow, "ph": "s", "ts": before.stop * 1e6, "tid": lanes.index(before.lane)})
                rows.append({**arrow, "ph": "f", "bp": "e", "ts": o.start * 1e6, "tid": lanes.index(o.lane)})
        return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})

    def _page(self) -> str:
        return picture.page(self.operations, self.summary())

    def _dot(self) -> str:
        return picture.trace_dot(self.operations)


active: list[Trace] = []


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Records what is pushed inside; what is still pending when it ends is recorded when it has run."""
    trace = Trace()
    active.append(trace)
    try:
        yield trace
    finally:
        active.remove(trace)


def note(operation: "Operation", before: Sequence["Operation"]) -> None:
    """An operation was pushed behind others."""
    numbers = sorted({other.number for other in before if other is not operation})
    place = operation.lane.device.name, operation.lane.name
    noted = TracedOperation(
        operation.number, operation.name, *place, operation.phase, operation.line, numbers
    )  # fmt: skip
    for trace in active:
        trace.noted.append(noted)
    operation.record = noted
