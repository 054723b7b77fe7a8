"""The report's charts, for one run or several; `width` is drawing.WIDE or drawing.NARROW."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lockstep.report.diagnosis import split_time
from lockstep.report.drawing import Label, Line, draw, new_axes, thin, write_labels
from lockstep.report.runlog import Point, RunLog
from lockstep.report.theme import RUNS, colour


def loss(runs: list[RunLog], width: int) -> Figure:
    """Training and validation loss by epoch."""
    lines = []
    for run, name in zip(runs, RUNS, strict=False):
        validation = [(entry.epoch, entry.loss) for entry in run.validations if entry.loss is not None]
        lines += _pair(runs, run, name, _of(run, lambda point: point.loss), validation, number)
    return draw(lines, width, "loss: cross-entropy in nats", number)


def error(runs: list[RunLog], width: int) -> Figure:
    """Training and validation error by epoch; of a single run the top-5 error too."""
    lines = []
    for run, name in zip(runs, RUNS, strict=False):
        validation = [(entry.epoch, entry.error_top1) for entry in run.validations]
        lines += _pair(runs, run, name, _of(run, lambda point: point.error), validation, percent)
        top5 = [(entry.epoch, entry.error_top5) for entry in run.validations if entry.error_top5]
        if len(runs) == 1 and top5:
            lines.append(Line(top5, f"top-5 {percent(top5[-1][1])}", name, "dashed"))
    return draw(lines, width, "error: share of pictures", percent)


def learning_rate(runs: list[RunLog], width: int) -> Figure:
    lines = [
        Line(_of(run, lambda point: point.learning_rate), _name(runs, run), name, "steps")
        for run, name in zip(runs, RUNS, strict=False)
    ]
    return draw(lines, width, "learning rate", number)


def speed(runs: list[RunLog], width: int) -> Figure:
    """Training images a second."""
    lines = [
        Line(_of(run, lambda point: point.images_per_second), _name(runs, run), name, "thick")
        for run, name in zip(runs, RUNS, strict=False)
    ]
    return draw(lines, width, "training images a second", lambda value: f"{value:,.0f}", "linear")


def time_split(runs: list[RunLog], width: int) -> Figure:
    """The share of each phase by epoch, stacked, of a single run."""
    figure, axes = new_axes(width, "share of the trainer's time")
    (run,) = runs
    split = split_time(run)
    assert split
    known = [point for point in run.points if sum(point.seconds.values()) > 0]
    x = thin([point.epochs for point in known])
    x[0] = int(x[0])  # a line of progress tells of the time before it
    bottom, labels = np.zeros(len(x)), []
    for phase in ("compute", "exchange", "meet", "load-wait"):
        top = bottom + thin([point.seconds.get(phase, 0.0) / sum(point.seconds.values()) for point in known])
        axes.fill_between(x, bottom, top, color=colour(phase), linewidth=0)
        text = f"{phase} {rough_percent(split.shares[phase])}"
        labels.append(Label(float(bottom[-1] + top[-1]) / 2, text, phase))
        bottom = top
    axes.set(xlim=(0, x[-1]), ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    write_labels(axes, width, labels)
    return figure


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:.3g}"


def percent(share: float) -> str:
    """0.01944 as '1.94%', 0.3 as '30%'."""
    return f"{share * 100:.3g}%"


def rough_percent(share: float) -> str:
    """In whole numbers; '<1%' for what is little, but not nothing."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def milliseconds(seconds: float) -> str:
    """0.0137 as '14 ms'."""
    return f"{seconds * 1e3:,.0f} ms" if seconds > 0.00995 else f"{seconds * 1e3:.2g} ms"


def _pair(
    runs: list[RunLog],
    run: RunLog,
    name: str,
    training: Sequence[tuple[float, float]],
    validation: Sequence[tuple[float, float]],
    text: Callable[[float], str],
) -> list[Line]:
    """The lines of training and validation: a single run's say what they are, others whose."""
    if len(runs) == 1:
        labels = [
            f"{what} {text(points[-1][1])}" if points else None
            for what, points in (("training", training), ("validation", validation))
        ]
    else:
        labels = [None, run.name] if validation else [run.name, None]
    return [Line(training, labels[0], name, "thin"), Line(validation, labels[1], name, "dots")]


def _name(runs: list[RunLog], run: RunLog) -> str:
    """What stands at a line's end: '' is for its last value."""
    return run.name if len(runs) > 1 else ""


def _of(run: RunLog, value: Callable[[Point], float | None]) -> list[tuple[float, float]]:
    return [(point.epochs, found) for point in run.points if (found := value(point)) is not None]
