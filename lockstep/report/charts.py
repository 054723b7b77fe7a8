"""The report's charts of one or several runs. `width` is drawing.WIDE or drawing.NARROW."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lockstep.optim.schedules import SCHEDULES
from lockstep.report.diagnosis import split_time
from lockstep.report.drawing import Label, Line, draw, new_axes, thin, write_labels
from lockstep.report.runlog import Point, RunLog
from lockstep.report.theme import colour, colour_of_run, dashes_of_run

_PRECISIONS = (("mean_average_precision", "mAP", "dots"), ("macro_f1", "macro F1", "dashed"))


def loss(runs: list[RunLog], width: int) -> Figure:
    """Draw training and validation loss by epoch."""
    lines = []
    for place, run in enumerate(runs):
        validation = [(entry.epoch, entry.loss) for entry in run.validations if entry.loss is not None]
        lines += _pair(runs, place, _of(run, lambda point: point.loss), validation, number)
    return draw(lines, width, "loss: cross-entropy in nats", number)


def error(runs: list[RunLog], width: int) -> Figure:
    """Draw training and validation error by epoch, for a single run also the top-5 error.

    The error of `task: multilabel` is the share of all decisions that are wrong.
    """
    lines = []
    for place, run in enumerate(runs):
        errors = [
            (entry.epoch, entry.error_top1 if entry.error_top1 is not None else entry.label_error)
            for entry in run.validations
        ]
        validation = [(epoch, value) for epoch, value in errors if value is not None]
        lines += _pair(runs, place, _of(run, lambda point: point.error), validation, percent)
        top5 = [(entry.epoch, entry.error_top5) for entry in run.validations if entry.error_top5 is not None]
        if len(runs) == 1 and top5:
            lines.append(Line(top5, f"top-5 {percent(top5[-1][1])}", colour_of_run(place), "dashed"))
    return draw(lines, width, "error: share of images", percent)


def precision(runs: list[RunLog], width: int) -> Figure:
    """Draw mean average precision and macro F1 of the validation by epoch."""
    lines = []
    for place, run in enumerate(runs):
        for name, title, look in _PRECISIONS:
            values = [(entry.epoch, getattr(entry, name)) for entry in run.validations]
            points = [(epoch, value) for epoch, value in values if value is not None]
            if points and (len(runs) == 1 or look == "dots"):
                label = run.name if len(runs) > 1 else f"{title} {percent(points[-1][1])}"
                lines.append(Line(points, label, colour_of_run(place), look, dashes_of_run(place)))
    return draw(lines, width, "mean average precision", percent, "linear")


def learning_rate(runs: list[RunLog], width: int) -> Figure:
    """Draw the learning rate by epoch."""
    lines = [
        _line(runs, place, _of(run, lambda point: point.learning_rate), _look_of_rate(run))
        for place, run in enumerate(runs)
    ]
    return draw(lines, width, "learning rate", number)


def _look_of_rate(run: RunLog) -> str:
    """Return the look of a rate that changes a little with every step, or between epochs."""
    curves = [name for name, policy in SCHEDULES.items() if policy.falls_to_least]
    is_curve = run.config.get("lr_policy") in curves and run.config.get("lr_update") in ("auto", "step")
    return "thick" if is_curve else "steps"


def speed(runs: list[RunLog], width: int) -> Figure:
    """Draw training images per second."""
    lines = [
        _line(runs, place, _of(run, lambda point: point.images_per_second), "thick")
        for place, run in enumerate(runs)
    ]
    return draw(lines, width, "training images a second", lambda value: f"{value:,.0f}", "linear")


def time_split(runs: list[RunLog], width: int) -> Figure:
    """Draw the stacked shares of each phase by epoch, of a single run."""
    figure, axes = new_axes(width, "share of the trainer's time")
    (run,) = runs
    split = split_time(run)
    assert split
    known = [point for point in run.points if sum(point.seconds.values()) > 0]
    if len(known) == 1:
        known = 2 * known  # an area needs two points
    x = thin([point.epochs for point in known])
    x[0] = int(x[0])  # a line of progress covers the time before it
    bottom, labels = np.zeros(len(x)), []
    for phase in ("compute", "exchange", "barrier", "load-wait"):
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
    """Format a value with three significant digits."""
    return f"{value:.3g}"


def percent(share: float) -> str:
    """Format 0.01944 as '1.94%', 0.3 as '30%'."""
    return f"{share * 100:.3g}%"


def rough_percent(share: float) -> str:
    """Format a share as a whole percentage; a small share above 0 is '<1%'."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def milliseconds(seconds: float) -> str:
    """Format 0.0137 as '14 ms'."""
    return f"{seconds * 1e3:,.0f} ms" if seconds > 0.00995 else f"{seconds * 1e3:.2g} ms"


def _pair(
    runs: list[RunLog],
    place: int,
    training: Sequence[tuple[float, float]],
    validation: Sequence[tuple[float, float]],
    text: Callable[[float], str],
) -> list[Line]:
    """Return the training and validation lines of run number `place`. A single run's lines have labels."""
    run = runs[place]
    if len(runs) == 1:
        labels = [
            f"{what} {text(points[-1][1])}" if points else None
            for what, points in (("training", training), ("validation", validation))
        ]
    else:
        labels = [None, run.name] if validation else [run.name, None]
    looks = colour_of_run(place), dashes_of_run(place)
    return [
        Line(training, labels[0], looks[0], "thin", looks[1]),
        Line(validation, labels[1], looks[0], "dots", looks[1]),
    ]


def _line(runs: list[RunLog], place: int, points: Sequence[tuple[float, float]], look: str) -> Line:
    """Return the only line of run number `place`, with the run's name or last value as its label."""
    label = runs[place].name if len(runs) > 1 else ""
    return Line(points, label, colour_of_run(place), look, dashes_of_run(place))


def _of(run: RunLog, value: Callable[[Point], float | None]) -> list[tuple[float, float]]:
    return [(point.epochs, y) for point in run.points if (y := value(point)) is not None]
