"""The sections of the report's page, as HTML; each is empty where a run has not come to it yet.

`pictures` is the folder for the PNG files.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.report import charts, drawing, page, theme
from lockstep.report.confusion import Confusion, Examples
from lockstep.report.diagnosis import TimeSplit, explain, split_time
from lockstep.report.filters import draw_filters, read_filters
from lockstep.report.runlog import RunLog

_PHASES = {
    "compute": "forward, backward, update",
    "exchange": "averaging with the other trainers",
    "meet": "waiting for the other trainers",
    "load-wait": "waiting for a minibatch",
}


def learning(runs: list[RunLog], pictures: Path) -> str:
    validated = any(run.validations for run in runs)
    parts = []
    if _known(runs, "loss") or any(entry.loss is not None for run in runs for entry in run.validations):
        text = "Thin: training, between two lines of progress. Thick: validation."
        parts.append(_chart(runs, pictures, "loss", "Loss", charts.loss, text))
    if validated or _known(runs, "error"):
        text = "Thin: training. Thick: validation. Top-1 unless said otherwise."
        parts.append(_chart(runs, pictures, "error", "Error", charts.error, text))
    if _known(runs, "learning_rate"):
        parts.append(_chart(runs, pictures, "learning_rate", "Learning rate", charts.learning_rate, ""))
    return page.section("Learning", page.grid(parts) or page.paragraph("No line of progress yet."))


def time_split(runs: list[RunLog], pictures: Path) -> str:
    several = len(runs) > 1
    splits = [(run, split) for run in runs if (split := split_time(run))]
    parts = [_verdict(run, split, several) for run, split in splits]
    if splits and not several:
        parts.append(_chart(runs, pictures, "time", "Time by phase", charts.time_split, ""))
    if _known(runs, "images_per_second"):
        parts.append(
            _chart(runs, pictures, "images_per_second", "Speed", charts.speed, "All trainers together.")
        )
    return page.section("Where the time goes", page.grid(parts))


def filters(runs: list[RunLog], pictures: Path) -> str:
    parts = []
    for number, run in enumerate(runs):
        if run.checkpoint is None:
            continue
        try:
            found = read_filters(run.checkpoint.path)
        except UserError as error:
            run.notes.append(str(error))
            continue
        if not found:
            continue
        name, weights = found
        sheet = draw_filters(weights)
        sheet.save(pictures / f"filters{number or ''}.png")
        whose = f"{run.name}, " if len(runs) > 1 else ""
        text = f"{whose}{name} after epoch {run.checkpoint.state.epoch}: {len(weights)} filters of "
        text += f"{weights.shape[1]} x {weights.shape[2]}, each scaled by its largest weight; grey is zero."
        parts.append(
            page.paragraph(text, "muted") + page.image(sheet, "filters of the first layer", "filters")
        )
    return page.section("First-layer filters", *parts)


def examples(run: RunLog, n_images: int) -> str:
    if run.checkpoint is None:
        return ""
    from lockstep.report.examples import try_examples  # torch, which takes seconds to import

    try:
        found = try_examples(run.checkpoint, n_images)
    except UserError as error:
        run.notes.append(f"no examples of confused classes: {error}")
        return ""
    pairs = "".join(_pair(confusion) for confusion in found.confusions)
    text = f"{run.name} after epoch {run.checkpoint.state.epoch}, {_tried(found)}"
    return page.section(
        "Most confused classes",
        page.paragraph(text, "muted"),
        f'<div class="pairs">{pairs}</div>' if pairs else "",
    )


def configuration(runs: list[RunLog]) -> str:
    configs = [run.config for run in runs]
    ways = [run.ways for run in runs]
    made_with = [{**run.versions, **run.machine} for run in runs]
    titles = "Configuration", "Which way each part was computed", "Versions and machine"
    if len(runs) > 1:
        parts = [page.comparison(runs, values) for values in (configs, ways, made_with)]
    else:
        parts = [page.keys(configs[0], _changed(runs[0])), page.keys(ways[0]), page.keys(made_with[0])]
    return "".join(page.section(title, part) for title, part in zip(titles, parts, strict=True))


def _changed(run: RunLog) -> set[str]:
    """The keys whose value is not the default one."""
    defaults = Config()
    return {
        key
        for key, value in run.config.items()
        if page.plain(value) != page.plain(getattr(defaults, key, None))
    }


def _known(runs: list[RunLog], value: str) -> bool:
    return any(getattr(point, value) is not None for run in runs for point in run.points)


def _chart(
    runs: list[RunLog],
    pictures: Path,
    name: str,
    title: str,
    draw: Callable[[list[RunLog], int], Figure],
    caption: str,
) -> str:
    """Drawn twice, for wide and for narrow windows, and as <name>.png."""
    wide, narrow = draw(runs, drawing.WIDE), draw(runs, drawing.NARROW)
    theme.save_png(wide, pictures / f"{name}.png")
    svg = theme.to_svg(wide, name, "wide", title) + theme.to_svg(narrow, f"{name}-narrow", "narrow", title)
    return page.figure(title, svg, caption)


def _verdict(run: RunLog, split: TimeSplit, named: bool) -> str:
    """What limits the run, in words and in a bar."""
    sentence, advice = explain(split, run.config)
    bar = legend = ""
    for phase, meaning in _PHASES.items():
        share, seconds = split.shares[phase], split.seconds_per_step
        bar += f'<span style="width: {share:.2%}; background: var(--{phase})"></span>'
        per_step = f", {charts.milliseconds(seconds * share)} a step" if seconds else ""
        if phase == "exchange" and split.bytes_per_step:
            per_step += f" for {split.bytes_per_step / 1e6:,.1f} MB"
        if phase == "exchange" and split.network_bytes_per_step:
            per_step += f", and {split.network_bytes_per_step / 1e6:,.1f} MB to other hosts"
        text = f"{phase} {charts.rough_percent(share)}{per_step}: {meaning}"
        legend += f"<li>{page.swatch(phase)}{escape(text)}</li>"
    name = f"<h3>{escape(run.name)}</h3>" if named else ""
    words = (
        page.paragraph("What limits this run", "muted")
        + page.paragraph(sentence, "first")
        + page.paragraph(advice)
    )
    bars = f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul>'
    return f'<div class="verdict">{name}{words}{bars}</div>'


def _tried(found: Examples) -> str:
    there, tried = f"{found.n_there:,}", f"{found.n_images:,}"
    text = f"tried on {f'all {there}' if tried == there else f'{tried} of {there}'} validation images: "
    text += f"{found.n_wrong:,} wrong ({charts.percent(found.n_wrong / found.n_images)})."
    if found.n_pairs > len(found.confusions):
        text += f" The {len(found.confusions)} most frequent of {found.n_pairs:,} confusions."
    return text + (" Below each picture: the network's probability for its answer." if found.n_wrong else "")


def _pair(confusion: Confusion) -> str:
    label, answer = escape(confusion.label), escape(confusion.answer)
    alt = f"{confusion.label} taken for {confusion.answer}"
    pictures = "".join(
        f"<div>{page.image(picture, alt)}{probability:.0%}</div>"
        for picture, probability in confusion.pictures
    )
    return (
        f'<div class="pair"><h3>{label} taken for {answer}</h3>'
        f'<div class="muted">{confusion.n_images:,} of {confusion.n_of_class:,} images of {label}</div>'
        f'<div class="pictures">{pictures}</div></div>'
    )
