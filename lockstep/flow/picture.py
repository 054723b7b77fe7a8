"""Pictures of what waits for what: a page with lanes as rows, and graphs for Graphviz."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

_COLOURS = {
    "forward": "#4c86c6", "backward": "#d98b3a", "merge": "#8e63b8", "update": "#4f9d5b", "copy": "#b8a13a",
    "fetch": "#7f8c94", "call": "#c25a6a",
}  # fmt: skip
_WIDTH, _ROW, _LEFT = 1160, 44, 150


def colour(phase: str) -> str:
    return _COLOURS.get(phase, "#999999")


def page(operations: Sequence[Any], summary: str) -> str:
    """A self-contained page:

    each lane a row, each operation a bar; pointing at one shows its edges and times.
    """
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


def trace_dot(operations: Iterable[Any]) -> str:
    """Operations as boxes, one cluster a lane."""
    operations = list(operations)
    known = {o.number for o in operations}
    lines = ["digraph trace {", "  node [shape=box, style=filled, fontcolor=white];"]
    for n, lane in enumerate(dict.fromkeys(o.lane for o in operations)):
        lines.append(f"  subgraph cluster{n} {{ label={json.dumps(lane)};")
        for o in (o for o in operations if o.lane == lane):
            label = json.dumps(f"{o.number} {o.name}\n{o.seconds * 1e3:.3f} ms")
            lines.append(f'    o{o.number} [label={label}, fillcolor="{colour(o.phase)}"];')
        lines.append("  }")
    lines += [
        f"  o{before} -> o{o.number};" for o in operations for before in o.waited_for if before in known
    ]
    return "\n".join([*lines, "}", ""])


def program_dot(operations: Sequence[Any], variables: Sequence[Any], edges: Iterable[tuple[int, int]]) -> str:
    """Operations as boxes, versions of variables as ellipses; waits that no value tells are dashed."""
    lines = ["digraph program {", "  node [shape=ellipse];"]
    for n, variable in enumerate(variables):
        label = json.dumps(f"{variable.name}\n{variable.device}, version {variable.version}")
        lines.append(f"  v{n} [label={label}];")
    told = set()
    for o in operations:
        label = json.dumps(f"{o.number} {o.name}\n{o.lane} of {o.device}")
        look = f'shape=box, style=filled, fontcolor=white, fillcolor="{colour(o.phase)}"'
        lines.append(f"  o{o.number} [label={label}, {look}];")
        lines += [f"  v{n} -> o{o.number};" for n in o.inputs] + [
            f"  o{o.number} -> v{n};" for n in o.outputs
        ]
        told |= {(variables[n].generated_by, o.number) for n in o.inputs}
    lines += [f"  o{a} -> o{b} [style=dashed];" for a, b in sorted(edges) if (a, b) not in told]
    return "\n".join([*lines, "}", ""])
