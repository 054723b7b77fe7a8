"""The writer of timelines in Chrome's trace event format, which Perfetto and chrome://tracing show.

The format is described in the Chromium project's document "Trace Event Format".
"""

import json
from typing import Any, Literal, NamedTuple


class Row(NamedTuple):
    """A row of a timeline: a thread of a process."""

    process: int
    thread: int


class ChromeTrace:
    """A timeline: named rows, spans on them, and arrows between rows. All times are in microseconds.

    Attributes:
        events: The events in the format's terms, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def name(self, row: Row, name: str, of: Literal["process", "thread"]) -> None:
        """Name a row's process or thread."""
        self._add("M", f"{of}_name", row, args={"name": name})

    def span(
        self, row: Row, name: str, category: str, start: float, duration: float, **arguments: object
    ) -> None:
        """Add a span. A click on it shows the arguments."""
        self._add("X", name, row, cat=category, ts=start, dur=duration, args=arguments)

    def instant(self, row: Row, name: str, category: str, time: float, **arguments: object) -> None:
        """Mark a point in time of a row. A click on it shows the arguments."""
        self._add("i", name, row, cat=category, ts=time, s="t", args=arguments)

    def arrow(self, name: str, identity: str, tail: tuple[Row, float], head: tuple[Row, float]) -> None:
        """Draw an arrow from one row at a time to another row at a time."""
        self._add("s", name, tail[0], cat="edge", id=identity, ts=tail[1])
        self._add("f", name, head[0], cat="edge", id=identity, ts=head[1], bp="e")

    def to_json(self) -> str:
        """Return the text of a trace file."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": self.events})

    def _add(self, kind: str, name: str, row: Row, **rest: object) -> None:
        self.events.append({"ph": kind, "name": name, "pid": row.process, "tid": row.thread, **rest})
