"""The HTML elements of the report's page. They escape all text of a run."""

import base64
import io
import json
from collections.abc import Container, Iterable
from html import escape
from importlib import resources
from typing import Any

from PIL import Image

from lockstep.report import summary, theme
from lockstep.report.runlog import RunLog

_CHANGED = ' class="changed"'
# Without the script the page follows the system's theme. The script makes the button, which needs it.
_SCRIPT = """
const root = document.documentElement, button = document.createElement("button");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; name(); };
name(); document.querySelector("header").append(button);
for (const head of document.querySelectorAll("table.sortable th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const up = head.dataset.order !== "up";
  const value = (row) => row.cells[column].textContent.replaceAll(",", "");
  const compare = (a, b) => column ? value(a) - value(b) : value(a).localeCompare(value(b));
  const rows = [...body.rows].sort((a, b) => up ? compare(a, b) : compare(b, a));
  head.dataset.order = up ? "up" : "down";
  body.append(...rows);
};
"""


def whole_page(
    title: str, lead: str, sections: Iterable[str], footer: str, reload_seconds: float | None
) -> str:
    """Return the page around its sections, which are HTML.

    Args:
        title: Text of the heading.
        lead: Text below it.
        sections: The sections.
        footer: Text of the footer.
        reload_seconds: Seconds after which a browser reads the file again; None: never.
    """
    again = f'<meta http-equiv="refresh" content="{reload_seconds:g}">\n' if reload_seconds else ""
    light, dark = theme.css_variables(0), theme.css_variables(1)
    style = (
        f":root {{ color-scheme: light; {light} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n"
        "@media (prefers-color-scheme: dark) {\n"
        f":root:not([data-theme=light]) {{ color-scheme: dark; {dark} }} }}\n"
        + resources.files("lockstep.report").joinpath("style.css").read_text(encoding="utf-8")
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{again}<title>{escape(title)}: Lockstep</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n"
        f'<body>\n<header><div><h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p></div></header>\n'
        + "\n".join(section for section in sections if section)
        + f"\n<footer>{escape(footer)}</footer>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a section, or '' if its parts are empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def grid(parts: list[str]) -> str:
    """Return the parts side by side, as many as fit into a row, or '' without parts."""
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text, with a class of the style sheet."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def figure(title: str, drawing: str, caption: str) -> str:
    """Return a figure. `drawing` is HTML."""
    return f"<figure><h3>{escape(title)}</h3>\n{drawing}\n<figcaption>{escape(caption)}</figcaption></figure>"


def image(source: Image.Image, alt: str, kind: str = "") -> str:
    """Return an embedded image: JPEG if it is large, and gray or RGB; else PNG."""
    content = io.BytesIO()
    as_png = source.mode not in ("L", "RGB") or max(source.size) <= 48
    source.save(content, "PNG" if as_png else "JPEG", optimize=True, **({} if as_png else {"quality": 88}))
    data = base64.b64encode(content.getvalue()).decode()
    form = "png" if as_png else "jpeg"
    return f'<img class="{kind}" alt="{escape(alt)}" src="data:image/{form};base64,{data}">'


def tiles(run: RunLog) -> str:
    """Return the main results of a run, each with its name above and details below."""
    cells = "\n".join(
        f'<div><dt>{escape(what)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="more">{escape(more)}</dd></div>'
        for what, value, more in summary.tiles(run)
    )
    return f'<dl class="tiles">\n{cells}\n</dl>'


def runs_table(runs: list[RunLog], now: float) -> str:
    """Return a table with a row per run, which starts with its color."""
    numbers = [[value for _, value, _ in summary.tiles(run)] for run in runs]
    own = summary.differences(runs)
    heads = ["Run", "Differs in", *(what for what, _, _ in summary.tiles(runs[0])), "State"]
    rows = [
        [
            run_swatch(place) + escape(run.name),
            escape("; ".join(f"{key}: {plain(value)}" for key, value in own[place].items())),
            *map(escape, numbers[place]),
            escape(summary.state(run, now)),
        ]
        for place, run in enumerate(runs)
    ]
    return table([escape(head) for head in heads], rows, numeric=range(2, len(heads) - 1))


def swatch(name: str) -> str:
    """Return a small square of a color."""
    return f'<span class="swatch" style="background: var(--{name})"></span>'


def run_swatch(place: int) -> str:
    """Return the sign of a run's color."""
    return swatch(theme.colour_of_run(place))


def notes(texts: list[str]) -> str:
    """Return a box of notes on what could not be read, or '' without any."""
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="notes"><h3>What could not be read</h3><ul>{items}</ul></div>'


def keys(values: dict[str, Any], strong: Container[str] = ()) -> str:
    """Return names and values in as many columns as fit. The names in `strong` are bold."""
    items = "".join(
        f"<div{_CHANGED if key in strong else ''}><dt>{escape(key)}</dt><dd>{escape(plain(value))}</dd></div>"
        for key, value in values.items()
    )
    return f'<dl class="keys">{items}</dl>' if items else ""


def comparison(runs: list[RunLog], mappings: list[dict[str, Any]]) -> str:
    """Return a table with a column per run: the keys that differ, with the others folded."""
    names = dict.fromkeys(key for values in mappings for key in values)
    texts = {name: [plain(values[name]) if name in values else "-" for values in mappings] for name in names}
    heads = ["", *(run_swatch(place) + escape(run.name) for place, run in enumerate(runs))]
    differing: list[list[str]] = []
    equal: list[list[str]] = []
    for name, values in texts.items():
        (differing if len(set(values)) > 1 else equal).append([escape(name), *map(escape, values)])
    parts = [table(heads, differing)] if differing else []
    if equal:
        parts.append(
            f"<details><summary>{len(equal)} that are equal</summary>{table(heads, equal)}</details>"
        )
    return "".join(parts)


def table(
    heads: list[str], rows: list[list[str]], numeric: Iterable[int] = (), sortable: bool = False
) -> str:
    """Return a table of HTML cells. The columns in `numeric` are right-aligned; heads of a sortable sort."""
    kinds = [' class="number"' if column in numeric else "" for column in range(len(heads))]
    head = "".join(f"<th{kind}>{text}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{text}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    kind = ' class="sortable"' if sortable else ""
    parts = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    return f'<div class="scroll"><table{kind}>{parts}</table></div>'


def plain(value: Any) -> str:
    """Return a YAML value as one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "[]"
    return json.dumps(value, default=str, ensure_ascii=False)
