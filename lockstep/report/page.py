"""Pieces of the report's page. Whatever a run has written is escaped here."""

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
from lockstep.report.theme import RUNS

_CHANGED = ' class="changed"'
# Without it the page follows the system's theme; the button is made here because only a script can serve it.
_SCRIPT = """
const root = document.documentElement, button = document.createElement("button");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; name(); };
name(); document.querySelector("header").append(button);
"""


def whole_page(title: str, lead: str, sections: Iterable[str], footer: str) -> str:
    """The page around its sections, which are HTML already."""
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
        f'<title>{escape(title)}: Lockstep</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n"
        f'<body>\n<header><div><h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p></div></header>\n'
        + "\n".join(section for section in sections if section)
        + f"\n<footer>{escape(footer)}</footer>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Empty where there is nothing in it."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def grid(parts: list[str]) -> str:
    """Side by side, as many as there is room for; empty where there is none."""
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def figure(title: str, drawing: str, caption: str) -> str:
    """drawing: HTML."""
    return f"<figure><h3>{escape(title)}</h3>\n{drawing}\n<figcaption>{escape(caption)}</figcaption></figure>"


def image(picture: Image.Image, alt: str, kind: str = "") -> str:
    """An image within the page: PNG where it has transparent parts or is small, JPEG otherwise."""
    content = io.BytesIO()
    as_png = picture.mode == "RGBA" or max(picture.size) <= 48
    picture.save(content, "PNG" if as_png else "JPEG", optimize=True, **({} if as_png else {"quality": 88}))
    data = base64.b64encode(content.getvalue()).decode()
    form = "png" if as_png else "jpeg"
    return f'<img class="{kind}" alt="{escape(alt)}" src="data:image/{form};base64,{data}">'


def tiles(run: RunLog) -> str:
    cells = "\n".join(
        f'<div><dt>{escape(what)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="more">{escape(more)}</dd></div>'
        for what, value, more in summary.tiles(run)
    )
    return f'<dl class="tiles">\n{cells}\n</dl>'


def runs_table(runs: list[RunLog], now: float) -> str:
    """One row a run, its colour in front."""
    numbers = [[value for _, value, _ in summary.tiles(run)] for run in runs]
    heads = ["Run", *(what for what, _, _ in summary.tiles(runs[0])), "State"]
    rows = [
        [swatch(name) + escape(run.name), *map(escape, values), escape(summary.state(run, now))]
        for run, name, values in zip(runs, RUNS, numbers, strict=False)
    ]
    return _table([escape(head) for head in heads], rows, numeric=range(1, len(heads) - 1))


def swatch(name: str) -> str:
    return f'<span class="swatch" style="background: var(--{name})"></span>'


def notes(texts: list[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="notes"><h3>What could not be read</h3><ul>{items}</ul></div>'


def keys(values: dict[str, Any], strong: Container[str] = ()) -> str:
    """Names and values in as many columns as there is room for. strong: the names that stand out."""
    items = "".join(
        f"<div{_CHANGED if key in strong else ''}><dt>{escape(key)}</dt><dd>{escape(plain(value))}</dd></div>"
        for key, value in values.items()
    )
    return f'<dl class="keys">{items}</dl>' if items else ""


def comparison(runs: list[RunLog], mappings: list[dict[str, Any]]) -> str:
    """One column a run: the keys that differ; the others are folded up."""
    names = dict.fromkeys(key for values in mappings for key in values)
    texts = {name: [plain(values[name]) if name in values else "-" for values in mappings] for name in names}
    heads = ["", *(swatch(colour) + escape(run.name) for run, colour in zip(runs, RUNS, strict=False))]
    differing: list[list[str]] = []
    equal: list[list[str]] = []
    for name, values in texts.items():
        (differing if len(set(values)) > 1 else equal).append([escape(name), *map(escape, values)])
    parts = [_table(heads, differing)] if differing else []
    if equal:
        parts.append(
            f"<details><summary>{len(equal)} that are equal</summary>{_table(heads, equal)}</details>"
        )
    return "".join(parts)


def _table(heads: list[str], rows: list[list[str]], numeric: Iterable[int] = ()) -> str:
    """heads, rows: HTML. numeric: columns that are set right."""
    kinds = [' class="number"' if column in numeric else "" for column in range(len(heads))]
    head = "".join(f"<th{kind}>{text}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{text}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def plain(value: Any) -> str:
    """A value of YAML on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "[]"
    return json.dumps(value, default=str, ensure_ascii=False)
