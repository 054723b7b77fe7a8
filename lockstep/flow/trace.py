"""A record of what ran where and when, and what it waited for: its summary, its page, its graph.

The summary compares the time taken with what a schedule could reach: longest paths and list schedules (Graham
1969, section 2).
"""

import heapq
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.flow import private
from lockstep.trace.chrome import ChromeTrace, Row

_COLOURS = {
    "forward": "#4c86c6", "backward": "#d98b3a", "merge": "#8e63b8", "update": "#4f9d5b", "copy": "#b8a13a",
    "fetch": "#7f8c94", "call": "#c25a6a",
}  # fmt: skip
_WIDTH, _ROW, _LEFT = 1160, 44, 150  # pixels of a page


@dataclass(frozen=True)
class Task:
    """A unit of work.

    Attributes:
        lane: Where it runs; a lane runs one at a time.
        seconds: Its duration.
        after: Tasks that precede it.
    """

    lane: str
    seconds: float
    after: Sequence[int]


@dataclass
class TracedOperation:
    """An operation that ran.

    Attributes:
        phase: forward, backward, update, merge, copy, fetch or call.
        waited_for: Numbers of other operations.
        start: Seconds of time.perf_counter().
        stop: Seconds of time.perf_counter().
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
        """The duration."""
        return self.stop - self.start


@dataclass(eq=False)  # `active` has each once, also two that have recorded the same so far
class Trace:
    """The operations that were pushed while it was recorded."""

    pushed: list[TracedOperation] = field(default_factory=list)
    _lanes: dict[str, list[Any]] = field(default_factory=dict, repr=False)  # by name

    def label(self, lane: Any) -> str:
        """Return the lane's name, with a number where lanes of other devices have the same."""
        same = self._lanes.setdefault(lane.name, [])
        if lane not in same:
            same.append(lane)
        return str(lane.name) if same[0] is lane else f"{lane.name} #{same.index(lane) + 1}"

    @property
    def operations(self) -> list[TracedOperation]:
        """The operations that have run, in program order."""
        return sorted((each for each in self.pushed if each.stop), key=lambda each: each.number)

    def save(self, path: str | Path) -> None:
        """Write the trace: .json for Chrome and Perfetto, .html as a page, or .dot for Graphviz.

        Raises:
            UserError: The suffix is another, or the file cannot be written.
        """
        path = Path(path)
        writers: dict[str, Callable[[], str]] = {
            ".json": self._chrome,
            ".html": lambda: page(self.operations, self.summary()),
            ".dot": lambda: to_dot(self.operations),
        }
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
        """Return each lane's busy share, the critical path, and the time of a list schedule."""
        tasks = self.tasks()  # once: other threads' operations may still run
        operations = [o for o in self.operations if o.number in tasks]
        if not operations:
            return "nothing was recorded"
        span = max(o.stop for o in operations) - min(o.start for o in operations)
        lines = [f"{len(operations)} operations in {span * 1e3:.2f} ms"]
        for lane in dict.fromkeys(o.lane for o in operations):
            busy = sum(o.seconds for o in operations if o.lane == lane)
            lines.append(f"{lane}: busy {busy / span if span else 0:.0%}")
        seconds, path = critical_path(tasks)
        by_number = {o.number: o.name for o in operations}
        names = [by_number[number] for number in path]
        shown = names if len(names) <= 8 else [*names[:4], "...", *names[-4:]]
        lines.append(f"critical path: {seconds * 1e3:.2f} ms in {len(path)} operations: {' > '.join(shown)}")
        ideal = list_schedule(tasks)
        lines.append(
            f"a list schedule of these durations: {ideal * 1e3:.2f} ms, "
            f"{ideal / span if span else 1:.0%} of the time taken"
        )
        return "\n".join(lines)

    def tasks(self) -> dict[int, Task]:
        """Return the operations as tasks of a schedule, each after those that it waited for.

        Threads that push at the same time may be linked in another order than their operations are numbered.
        """
        return {o.number: Task(o.lane, o.seconds, o.waited_for) for o in self.pushed if o.stop}

    def _chrome(self) -> str:
        operations = self.operations  # once: more may end meanwhile, on other lanes
        lanes = dict.fromkeys(o.lane for o in operations)
        rows = {lane: Row(0, number) for number, lane in enumerate(lanes)}
        trace = ChromeTrace()
        for lane, row in rows.items():
            trace.name(row, lane, "thread")
        by_number = {o.number: o for o in operations}
        for o in operations:
            shown = {"number": o.number, "line": o.line, "waited for": o.waited_for}
            trace.span(rows[o.lane], o.name, o.phase, o.start * 1e6, o.seconds * 1e6, **shown)
            for before in (by_number[n] for n in o.waited_for if n in by_number):
                tail, head = (rows[before.lane], before.stop * 1e6), (rows[o.lane], o.start * 1e6)
                trace.arrow("waits", f"{before.number}-{o.number}", tail, head)
        return trace.to_json()


active: list[Trace] = []


class recording(private.Scope):  # noqa: N801
    """A scope that records what is pushed inside, also what is pending at its end and runs later."""

    def __init__(self) -> None:
        self.value = Trace()

    def calls(self) -> tuple[list[Any], list[Any]]:
        return [partial(active.append, self.value)], [partial(active.remove, self.value)]


def critical_path(tasks: Mapping[int, Task]) -> tuple[float, list[int]]:
    """Return seconds and numbers of the longest chain of tasks that wait for each other.

    The tasks are in a topological order.
    """
    ends: dict[int, float] = {}
    comes_from: dict[int, int] = {}
    for number in tasks:
        before = [b for b in tasks[number].after if b in tasks]
        latest = max(before, key=lambda b: ends[b], default=None)
        ends[number] = tasks[number].seconds + (0.0 if latest is None else ends[latest])
        if latest is not None:
            comes_from[number] = latest
    if not ends:
        return 0.0, []
    path = [max(ends, key=lambda n: ends[n])]
    while path[-1] in comes_from:
        path.append(comes_from[path[-1]])
    return ends[path[0]], path[::-1]


def list_schedule(tasks: Mapping[int, Task]) -> float:
    """Return the seconds of a schedule in which each lane takes the ready task with the smallest number."""
    missing = {number: sum(b in tasks for b in set(task.after)) for number, task in tasks.items()}
    next_ones: dict[int, list[int]] = {number: [] for number in tasks}
    for number, task in tasks.items():
        for before in set(task.after) & tasks.keys():
            next_ones[before].append(number)
    free = {task.lane for task in tasks.values()}
    ready: dict[str, list[int]] = {lane: [] for lane in free}
    for number in sorted(tasks):
        if not missing[number]:
            heapq.heappush(ready[tasks[number].lane], number)
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        for lane, waiting in ready.items():
            if waiting and lane in free:
                free.remove(lane)
                number = heapq.heappop(waiting)
                heapq.heappush(running, (now + tasks[number].seconds, number))
        if not running:
            return now
        now, done = heapq.heappop(running)
        free.add(tasks[done].lane)
        for number in next_ones[done]:
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready[tasks[number].lane], number)


def colour(phase: str) -> str:
    """Return the colour of a phase in diagrams."""
    return _COLOURS.get(phase, "#999999")


def page(operations: Sequence[Any], summary: str) -> str:
    """Return a self-contained page: lanes are rows, operations bars, with their edges and times."""
    lanes = list(dict.fromkeys(sorted(o.lane for o in operations)))
    first = min((o.start for o in operations), default=0.0)
    span = max((o.stop for o in operations), default=1.0) - first or 1.0
    boxes, bars = {}, []
    for o in operations:
        x = _LEFT + (o.start - first) / span * (_WIDTH - _LEFT - 20)
        width = max(o.seconds / span * (_WIDTH - _LEFT - 20), 0.6)
        y = 34 + lanes.index(o.lane) * _ROW
        boxes[o.number] = [round(x, 2), y, round(width, 2)]
        title = f"{o.number}: {o.name} on {o.device}, {o.phase}, {o.seconds * 1e3:.3f} ms, {o.line}"
        bars.append(
            f'<rect id="o{o.number}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 14}" '
            f'fill="{colour(o.phase)}"><title>{html.escape(title)}</title></rect>'
        )
    names = "".join(
        f'<text x="8" y="{34 + n * _ROW + 20}">{html.escape(lane)}</text>' for n, lane in enumerate(lanes)
    )
    phases = [phase for phase in _COLOURS if any(o.phase == phase for o in operations)]
    legend = "".join(
        f'<rect x="{_LEFT + 110 * n}" y="8" width="12" height="12" fill="{colour(p)}"/>'
        f'<text x="{_LEFT + 110 * n + 18}" y="19">{p}</text>'
        for n, p in enumerate(phases)
    )
    height = 44 + len(lanes) * _ROW
    edges = {o.number: [n for n in o.waited_for if n in boxes] for o in operations}
    return _PAGE.format(
        width=_WIDTH, height=height, drawing=legend + names + "".join(bars),
        scale=f"{span * 1e3:.2f} ms", boxes=json.dumps(boxes), edges=json.dumps(edges),
        summary=html.escape(summary), middle=(_ROW - 14) / 2,
    )  # fmt: skip


_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>What ran where</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 20px; color: #222; background: #fff }}
svg {{ background: #f6f7f8 }} text {{ font-size: 13px; fill: #333 }} rect:hover {{ stroke: #000 }}
.edge {{ stroke-width: 1.5; fill: none }} pre {{ white-space: pre-wrap }}</style></head><body>
<svg id="s" width="{width}" height="{height}" role="img">{drawing}
<g id="edges" pointer-events="none"></g></svg>
<p>{scale} from left to right. Point at an operation: what it waited for is blue, what waited for it red.
Shown first: the one for which most
on other lanes waited.</p>
<pre>{summary}</pre><script>
const boxes = {boxes}, edges = {edges}, after = {{}};
const group = document.getElementById("edges");
for (const [n, all] of Object.entries(edges))
  for (const b of all) (after[b] = after[b] || []).push(n);
function line(a, b, colour) {{
  const p = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const [x, y, w] = boxes[a], [u, v] = boxes[b];
  const m = {middle}, d = (u - x - w) / 2;
  const curve = `C${{x + w + d}} ${{y + m}} ${{u - d}} ${{v + m}}`;
  p.setAttribute("d", `M${{x + w}} ${{y + m}} ${{curve}} ${{u}} ${{v + m}}`);
  p.setAttribute("class", "edge"); p.setAttribute("stroke", colour); group.append(p);
}}
function show(n) {{
  group.replaceChildren();
  (edges[n] || []).forEach(b => line(b, n, "#1a5fb4"));
  (after[n] || []).forEach(a => line(n, a, "#c01c28"));
}}
document.getElementById("s").addEventListener("mouseover", event => show(event.target.id.slice(1)));
const far = n => (after[n] || []).filter(a => boxes[a][1] !== boxes[n][1]).length;
show(Object.keys(boxes).reduce((a, b) => far(a) >= far(b) ? a : b));
</script></body></html>
"""


def dot_label(text: str) -> str:
    """Return text as a quoted string of Graphviz, which knows HTML's numbers of characters but not JSON's."""
    return json.dumps(text.encode("ascii", "xmlcharrefreplace").decode())


def to_dot(operations: Iterable[Any]) -> str:
    """Return a graph with operations as boxes, one cluster per lane."""
    operations = list(operations)
    known = {o.number for o in operations}
    lines = ["digraph trace {", "  node [shape=box, style=filled, fontcolor=white];"]
    for n, lane in enumerate(dict.fromkeys(o.lane for o in operations)):
        lines.append(f"  subgraph cluster{n} {{ label={dot_label(lane)};")
        for o in (o for o in operations if o.lane == lane):
            label = dot_label(f"{o.number} {o.name}\n{o.seconds * 1e3:.3f} ms")
            lines.append(f'    o{o.number} [label={label}, fillcolor="{colour(o.phase)}"];')
        lines.append("  }")
    lines += [
        f"  o{before} -> o{o.number};" for o in operations for before in o.waited_for if before in known
    ]
    return "\n".join([*lines, "}", ""])
