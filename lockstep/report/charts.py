"""The report's charts. Each is drawn for a width in points, which are pixels on the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from lockstep.report.diagnosis import split_time
from lockstep.report.runlog import PHASES, Point, RunLog
from lockstep.report.theme import RUNS, colour

WIDE, NARROW = 470, 330
_HEIGHT = 240
_MOST_POINTS = 240  # of a line; more are averaged
_LOG_FROM = 15.0  # largest by smallest value from which on an axis is logarithmic
_LINE_OF_TEXT = 14.0


@dataclass(frozen=True)
class Line:
    """One line of a chart; `label` stands at its right end."""

    x: Sequence[float]
    y: Sequence[float]
    label: str
    colour: str
    style: str = "bold"  # bold, with a dot for each value; thin; dashed; steps


def cost(runs: list[RunLog], width: int) -> Figure:
    """Training and validation cost by epoch."""
    lines = []
    for run, name in zip(runs, RUNS, strict=False):
        lines.append(_training(run, lambda point: point.cost, name, _label(runs, run, "training")))
        found = [(entry.epoch, entry.loss) for entry in run.validations if entry.loss is not None]
        lines.append(_line(found, _label(runs, run, "validation"), name, "bold"))
    return _draw(lines, width, "cost: cross-entropy in nats", lambda value: f"{value:.3g}")


def error(runs: list[RunLog], width: int) -> Figure:
    """Training and validation error by epoch; of a single run the top-5 error too."""
    lines = []
    for run, name in zip(runs, RUNS, strict=False):
        lines.append(_training(run, lambda point: point.error, name, _label(runs, run, "training")))
        top1 = [(entry.epoch, entry.error_top1) for entry in run.validations]
        lines.append(_line(top1, _label(runs, run, "validation"), name, "bold"))
        if len(runs) == 1:
            top5 = [(entry.epoch, entry.error_top5) for entry in run.validations if entry.error_top5]
            lines.append(_line(top5, "top-5", name, "dashed"))
    return _draw(lines, width, "error: share of pictures", percent)


def learning_rate(runs: list[RunLog], width: int) -> Figure:
    lines = []
    for run, name in zip(runs, RUNS, strict=False):
        found = [
            (point.epochs, point.learning_rate) for point in run.points if point.learning_rate is not None
        ]
        lines.append(_line(found, _label(runs, run, ""), name, "steps"))
    return _draw(lines, width, "learning rate", lambda value: f"{value:g}")


def speed(runs: list[RunLog], width: int) -> Figure:
    """Training images a second."""
    lines = []
    for run, name in zip(runs, RUNS, strict=False):
        line = _training(run, lambda point: point.images_per_second, name, _label(runs, run, ""))
        lines.append(Line(line.x, line.y, line.label, line.colour, "plain"))
    return _draw(lines, width, "training images a second", lambda value: f"{value:,.0f}", from_zero=True)


def time_split(run: RunLog, width: int) -> Figure:
    """The share of each phase by epoch, stacked."""
    figure, axes = _new(width, "share of the trainer's time")
    known = [point for point in run.points if sum(point.seconds.values()) > 0]
    x = _thin([point.epochs for point in known])
    bottom = np.zeros(len(x))
    ends = []
    split = split_time(run)
    assert split
    for phase in ("compute", "exchange", "meet", "load-wait"):
        shares = [point.seconds.get(phase, 0.0) / sum(point.seconds.values()) for point in known]
        top = bottom + _thin(shares)
        axes.fill_between(x, bottom, top, color=colour(phase), linewidth=0)
        ends.append(((bottom[-1] + top[-1]) / 2, f"{phase} {percent(split.shares[phase])}", phase))
        bottom = top
    axes.set_ylim(0, 1)
    axes.set_xlim(x[0], x[-1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _epochs(axes)
    _write_labels(axes, ends)
    return figure


def time_bars(runs: list[RunLog], width: int) -> Figure:
    """A bar a run: the shares of the phases, and milliseconds a step."""
    figure = Figure((width / 72, (56 + 34 * len(runs)) / 72))
    left = 110 / width
    axes = figure.add_axes(
        (left, 34 / (56 + 34 * len(runs)), 1 - left - 80 / width, 34 * len(runs) / (56 + 34 * len(runs)))
    )
    for row, run in enumerate(runs):
        split, start = split_time(run), 0.0
        axes.text(
            -0.02, row, _short(run.name, 18), ha="right", va="center", transform=axes.get_yaxis_transform()
        )
        if split is None:
            continue
        for phase in ("compute", "exchange", "meet", "load-wait"):
            axes.barh(row, split.shares[phase], left=start, height=0.6, color=colour(phase), linewidth=0)
            start += split.shares[phase]
        if split.seconds_per_step:
            text = f"{split.seconds_per_step * 1e3:,.3g} ms/step"
            axes.text(1.02, row, text, va="center", transform=axes.get_yaxis_transform())
    axes.set(xlim=(0, 1), ylim=(len(runs) - 0.5, -0.5), yticks=[])
    axes.grid(False)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def percent(share: float) -> str:
    """0.0194 as '1.9%', 0.26 as '26%'."""
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share * 100:.2g}%"


def _label(runs: list[RunLog], run: RunLog, what: str) -> str:
    """A single run's lines are called by what they are, several runs' validation by the run."""
    if len(runs) == 1:
        return what
    return "" if what == "training" else run.name


def _training(run: RunLog, value: Callable[[Point], float | None], name: str, label: str) -> Line:
    found = [(point.epochs, number) for point in run.points if (number := value(point)) is not None]
    return _line(found, label, name, "thin")


def _line(found: Sequence[tuple[float, float]], label: str, name: str, style: str) -> Line:
    x, y = ([pair[axis] for pair in found] for axis in (0, 1))
    return Line(x, y, label, name, style)


def _thin(values: Sequence[float]) -> np.ndarray:
    """At most _MOST_POINTS values: means of neighbours."""
    array = np.asarray(values, np.float64)
    n_parts = min(len(array), _MOST_POINTS)
    return np.array([part.mean() for part in np.array_split(array, n_parts)]) if n_parts else array


def _new(width: int, title: str) -> tuple[Figure, Axes]:
    """title: what the vertical axis shows; it stands above, where it takes no width."""
    figure = Figure((width / 72, _HEIGHT / 72))
    left, right, bottom, top = 44, 112 if width == WIDE else 92, 36, 30
    box = (left / width, bottom / _HEIGHT, 1 - (left + right) / width, 1 - (bottom + top) / _HEIGHT)
    axes = figure.add_axes(box)
    figure.text(4 / width, 1 - 14 / _HEIGHT, title, color=colour("muted"), fontsize=11)
    return figure, axes


def _draw(
    lines: list[Line], width: int, title: str, text: Callable[[float], str], from_zero: bool = False
) -> Figure:
    lines = [line for line in lines if len(line.y)]
    values = [value for line in lines for value in line.y]
    log = not from_zero and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    figure, axes = _new(width, f"{title} (log scale)" if log else title)
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
    axes.set_xlim(0 if from_zero or not log else None, max(max(line.x) for line in lines))
    _epochs(axes)
    ends = [
        (line.y[-1], f"{line.label} {text(line.y[-1])}".strip(), line.colour) for line in lines if line.label
    ]
    _write_labels(axes, [(_fraction(axes, y), label, name) for y, label, name in ends])
    return figure


def _plot(axes: Axes, line: Line) -> None:
    x, y = line.x, line.y
    if line.style != "steps":
        x, y = _thin(x), _thin(y)
    looks = {
        "bold": {"linewidth": 1.8, "marker": "o", "markersize": 3.2 if len(y) <= 40 else 0},
        "thin": {"linewidth": 1.1, "alpha": 0.6},
        "dashed": {"linewidth": 1.3, "linestyle": (0, (4, 2.5))},
        "steps": {"linewidth": 1.8, "drawstyle": "steps-pre"},
        "plain": {"linewidth": 1.5},
    }
    axes.plot(x, y, color=colour(line.colour), **looks[line.style])


def _fraction(axes: Axes, y: float) -> float:
    """How far up the axes a value is, from 0 to 1."""
    pixel = axes.transData.transform((0.0, y))[1]
    return float(axes.transAxes.inverted().transform((0.0, pixel))[1])


def _write_labels(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """(height from 0 to 1, text, colour): each at its height on the right, moved apart where they would touch."""
    box = axes.get_position()
    figure = axes.get_figure()
    assert figure
    width, height = figure.get_size_inches() * 72
    gap = _LINE_OF_TEXT / (box.height * height)
    n_letters = int((width * (1 - box.x1) - 8) / 6.0)
    places: list[float] = []
    ordered = sorted(ends)
    for wanted, _, _ in ordered:
        places.append(max(wanted, places[-1] + gap) if places else max(wanted, 0.0))
    ceiling = 1.0
    for number in range(len(places) - 1, -1, -1):
        places[number] = min(places[number], ceiling)
        ceiling = places[number] - gap
    for place, (_, text, name) in zip(places, ordered, strict=True):
        axes.annotate(
            _short(text, n_letters),
            (1, place),
            xycoords="axes fraction",
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour(name),
        )


def _epochs(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("epoch", loc="right", labelpad=1)


def _short(text: str, n_letters: int) -> str:
    """Its end says more than its beginning: names of runs end with their time."""
    return text if len(text) <= n_letters else "…" + text[1 - n_letters :]
