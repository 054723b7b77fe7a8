"""The drawing of the report's charts: lines over epochs, with labels at their right ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lockstep.report.theme import colour

WIDE, NARROW = 470, 330  # points, equal to pixels on the page
_HEIGHT = 240
_LEFT, _BOTTOM, _TOP = 44, 36, 30
_RIGHT = {WIDE: 118, NARROW: 108}  # for labels
_LINE_OF_TEXT = 14.0
_LETTER = 5.8
_MOST_POINTS = 240  # per line; more are averaged
_LOG_FROM = 15.0  # least ratio of largest to smallest value for a logarithmic axis
_LOOKS: dict[str, dict[str, Any]] = {
    "dots": {"linewidth": 1.8, "marker": "o", "markersize": 3.2},
    "thick": {"linewidth": 1.8},
    "thin": {"linewidth": 1.1, "alpha": 0.6},
    "dashed": {"linewidth": 1.3, "linestyle": (0, (4, 2.5))},
    "steps": {"linewidth": 1.8, "drawstyle": "steps-pre"},
}


@dataclass(frozen=True)
class Line:
    """One line of (epoch, value) points, with the label at its end (or None), a color's name and a look.

    `dashes` is matplotlib's line style for looks without their own.
    """

    points: Sequence[tuple[float, float]]
    label: str | None
    colour: str
    look: str
    dashes: Any = "solid"


@dataclass(frozen=True)
class Label:
    """Text at the right edge. `height` is from 0 (bottom) to 1."""

    height: float
    text: str
    colour: str


def new_axes(width: int, title: str, n_labels: int = 0) -> tuple[Figure, Axes]:
    """Make axes over epochs, high enough for `n_labels`.

    `title` describes the vertical axis. It is above the axes, where it takes no width.
    """
    height = max(_HEIGHT, _BOTTOM + _TOP + n_labels * _LINE_OF_TEXT)
    figure = Figure((width / 72, height / 72))
    across, up = 1 - (_LEFT + _RIGHT[width]) / width, 1 - (_BOTTOM + _TOP) / height
    axes = figure.add_axes((_LEFT / width, _BOTTOM / height, across, up))
    figure.text(4 / width, 1 - 14 / height, title, color=colour("muted"))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("epoch", loc="right", labelpad=1)
    return figure, axes


def draw(
    lines: list[Line], width: int, title: str, text: Callable[[float], str], scale: str = "auto"
) -> Figure:
    """Draw lines over epochs.

    Args:
        lines: The lines.
        width: WIDE or NARROW.
        title: The description of the vertical axis.
        text: Formats a value.
        scale: 'linear', or 'auto': logarithmic if the values differ much.
    """
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points]
    log = scale == "auto" and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    labelled = [line for line in lines if line.label is not None]
    figure, axes = new_axes(width, f"{title} (log scale)" if log else title, len(labelled))
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
    ends = [(line.points[-1][1], line) for line in labelled]
    write_labels(
        axes, width, [Label(_height(axes, y), line.label or text(y), line.colour) for y, line in ends]
    )
    return figure


def thin(values: Sequence[float]) -> np.ndarray:
    """Return at most _MOST_POINTS values, as means of neighbors."""
    array = np.asarray(values, np.float64)
    return np.array([part.mean() for part in np.array_split(array, min(len(array), _MOST_POINTS))])


def write_labels(axes: Axes, width: int, labels: list[Label]) -> None:
    """Write labels at their heights, moved apart if they would overlap."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    gap = _LINE_OF_TEXT / (figure.get_figheight() * 72 - _BOTTOM - _TOP)
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
    looks = {"linestyle": line.dashes, **_LOOKS[line.look]}
    if line.look == "steps":  # starts at the beginning of the first epoch
        axes.plot([int(x[0]), *x], [y[0], *y], color=colour(line.colour), **looks)
        return
    if len(x) > 40:
        looks.pop("marker", None)
    axes.plot(thin(x), thin(y), color=colour(line.colour), **looks)


def _height(axes: Axes, y: float) -> float:
    """Return the height of a value in the axes, from 0 to 1."""
    pixel = axes.transData.transform((0.0, y))[1]
    return float(axes.transAxes.inverted().transform((0.0, pixel))[1])


def _shorten(text: str, n_letters: int) -> str:
    """Shorten a text at its start: names of runs end with their time."""
    return text if len(text) <= n_letters else "…" + text[1 - n_letters :]
