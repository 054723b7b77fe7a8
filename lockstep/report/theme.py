"""The report's colors in the light and dark themes, and figures that follow the theme.

A figure is drawn in the light colors, which all differ. That is its PNG. In its SVG, variables of the page's
style sheet replace all colors, so that one drawing serves both themes.
"""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Colors of runs: Okabe and Ito's, distinct for color-blind readers, adapted for lines and text.
RUNS = ("run0", "run1", "run2", "run3", "run4", "run5")
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (6, 2)),
    (0, (2, 2)),
    (0, (6, 2, 2, 2)),
)  # if there are more runs than colors
MOST_RUNS = len(RUNS) * len(DASHES)
COLOURS = {
    "page": ("#ffffff", "#14171a"),
    "panel": ("#f6f7f9", "#1c2024"),
    "text": ("#1a1e23", "#e7eaed"),
    "muted": ("#59636e", "#a2acb6"),
    "grid": ("#dfe3e8", "#323940"),
    "run0": ("#0069a8", "#58b4f0"),
    "run1": ("#c84a00", "#ff935a"),
    "run2": ("#00805f", "#3fd0a4"),
    "run3": ("#a8508a", "#e695c8"),
    "run4": ("#8f6500", "#e3b341"),
    "run5": ("#4b4f54", "#c3c8cd"),
    "load-wait": ("#c94a01", "#ff935b"),
    "compute": ("#6b7885", "#8794a1"),
    "barrier": ("#8f6501", "#e3b342"),
    "exchange": ("#a8508b", "#e695c9"),
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's font, searchable and accessible
    "text.parse_math": False,  # names of runs are not formulas
    "font.size": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.solid_capstyle": "round",
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.edgecolor": COLOURS["muted"][0],
    "xtick.color": COLOURS["muted"][0],
    "ytick.color": COLOURS["muted"][0],
    "text.color": COLOURS["text"][0],
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.8,
    "figure.facecolor": COLOURS["page"][0],
    "axes.facecolor": "none",
}


def colour(name: str) -> str:
    """Return the light color of a name, to draw with."""
    return COLOURS[name][0]


def colour_of_run(number: int) -> str:
    """Return the color's name of a report's run, numbered from 0."""
    return RUNS[number % len(RUNS)]


def dashes_of_run(number: int) -> Any:
    """Return the line style of a run."""
    return DASHES[number // len(RUNS) % len(DASHES)]


def apply() -> None:
    """Set matplotlib's style for the whole process."""
    matplotlib.rcParams.update(_STYLE)


def css_variables(theme: int) -> str:
    """Return the colors for a style sheet. theme: 0 is light, 1 is dark."""
    return " ".join(f"--{name}: {both[theme]};" for name, both in COLOURS.items())


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG in the light colors. Raise OSError if that fails."""
    figure.savefig(path, dpi=144)


def to_svg(figure: Figure, name: str, kind: str, label: str) -> str:
    """Return a figure as an HTML element.

    Args:
        figure: The figure.
        name: A name that is unique on the page.
        kind: The element's class.
        label: A description of the content.
    """
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    linked = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in linked else "", svg)
    return re.sub(r"<svg ", f'<svg class="{kind}" role="img" aria-label="{label}" ', svg, count=1)
