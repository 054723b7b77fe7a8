"""How the report's charts are drawn: lines over epochs, with their labels at their right ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lockstep.report.theme import colour

WIDE, NARROW = 470, 330  # points, which are pixels on the page
_HEIGHT = 240
_LEFT, _BOTTOM, _TOP = 44, 36, 30
_RIGHT = {WIDE: 118, NARROW: 108}  # for labels
_LINE_OF_TEXT = 14.0
_LETTER = 5.8
_MOST_POINTS = 240  # of a line; more are averaged
_LOG_FROM = 15.0  # largest by smallest value from which on an axis is logarithmic
_LOOKS: dict[str, dict[str, Any]] = {
    "dots": {"linewidth": 1.8, "marker": "o", "markersize": 3.2},
    "thick": {"linewidth": 1.8},
    "thin": {"linewidth": 1.1, "alpha": 0.6},
    "dashed": {"linewidth": 1.3, "linestyle": (0, (4, 2.5))},
    "steps": {"linewidth": 1.8, "drawstyle": "steps-pre"},
}


@dataclass(frozen=True)
class Line:
    """One line: points of (epoch, value), the label at its end (None: none), a colour's name, a look."""

    points: Sequence[tuple[float, float]]
    label: str | None
    colour: str
    look: str


@dataclass(frozen=True)
class Label:
    """Text at the right edge. height: from 0, the bottom, to 1."""

    height: float
    text: str
    colour: str


def new_axes(width: int, title: str) -> tuple[Figure, Axes]:
    """title: what the vertical axis shows; it stands above, where it takes no width."""
    figure = Figure((width / 72, _HEIGHT / 72))
    across, up = 1 - (_LEFT + _RIGHT[width]) / width, 1 - (_BOTTOM + _TOP) / _HEIGHT
    axes = figure.add_axes((_LEFT / width, _BOTTOM / _HEIGHT, across, up))
    figure.text(4 / width, 1 - 14 / _HEIGHT, title, color=colour("muted"))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("epoch", loc="right", labelpad=1)
    return figure, axes


def draw(
    lines: list[Line], width: int, title: str, text: Callable[[float], str], scale: str = "auto"
) -> Figure:
    """Lines over epochs.

    text: writes a value. scale: 'linear', or 'auto', which is logarithmic where values differ much.
    """
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points]
    log = scale == "auto" and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    figure, axes = new_axes(width, f"{title} (log scale)" if log else title)
    for line in lines:
        _plot(axes, line)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.06 * max(values) or 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlim(0, max(line.points[-1][0] for line in lines))
    ends = [(line.points[-1][1], line) for line in lines if line.label is not None]
    write_labels(
        axes, width, [Label(_height(axes, y), line.label or text(y), line.colour) for y, line in ends]
    )
    return figure


def thin(values: Sequence[float]) -> np.ndarray:
    """At most _MOST_POINTS values: means of neighbours."""
    array = np.asarray(values, np.float64)
    n_parts = min(len(array), _MOST_POINTS)
    return np.array([part.mean() for part in np.array_split(array, n_parts)]) if n_parts else array


def write_labels(axes: Axes, width: int, labels: list[Label]) -> None:
    """Each at its height, moved apart where they would touch."""
    gap = _LINE_OF_TEXT / (_HEIGHT - _BOTTOM - _TOP)
    ordered = sorted(labels, key=lambda label: label.height)
    places: list[float] = []
    for label in ordered:
        places.append(max(label.height, places[-1] + gap if places else 0.0))
    ceiling = 1.0
    for number in reversed(range(len(places))):
        places[number] = min(places[number], ceiling)
        ceiling = places[number] - gap
    n_letters = int((_RIGHT[width] - 8) / _LETTER)
    for place, label in zip(places, ordered, strict=True):
        axes.annotate(
            _shorten(label.text, n_letters),
            (1, place),
            xycoords="axes fraction",
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour(label.colour),
        )


def _plot(axes: Axes, line: Line) -> None:
    x, y = ([point[axis] for point in line.points] for axis in (0, 1))
    looks = dict(_LOOKS[line.look])
    if line.look == "steps":  # from the beginning of the first one's epoch on
        axes.plot([int(x[0]), *x], [y[0], *y], color=colour(line.colour), **looks)
        return
    if len(x) > 40:
        looks.pop("marker", None)
    axes.plot(thin(x), thin(y), color=colour(line.colour), **looks)


def _height(axes: Axes, y: float) -> float:
    """How far up the axes a value is, from 0 to 1."""
    pixel = axes.transData.transform((0.0, y))[1]
    return float(axes.transAxes.inverted().transform((0.0, pixel))[1])


def _shorten(text: str, n_letters: int) -> str:
    """Its end says more than its beginning: names of runs end with their time."""
    return text if len(text) <= n_letters else "…" + text[1 - n_letters :]
