"""The sections of the report's page as HTML. A section without data is ''.

The argument `folder` is the folder of the PNG files.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from lockstep.config import Layer, is_default, resolve
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.report import charts, drawing, page, theme
from lockstep.report.augmented import N_DRAWS, draw_sheet
from lockstep.report.diagnosis import TimeSplit, explain, split_time
from lockstep.report.filters import draw_filters, read_filters
from lockstep.report.ranks import ranks
from lockstep.report.runlog import RunLog

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from lockstep.report.examples import Confusion, Examples

_PHASES = {
    "compute": "forward, backward, update",
    "exchange": "averaging with the other trainers",
    "barrier": "waiting for the other trainers",
    "load-wait": "waiting for a minibatch",
}


def learning(runs: list[RunLog], folder: Path) -> str:
    """Return the section of curves: loss, error and learning rate by epoch."""
    validated = any(run.validations for run in runs)
    parts = []
    if _known(runs, "loss") or any(entry.loss is not None for run in runs for entry in run.validations):
        text = "Thin: training, between two lines of progress. Thick: validation."
        parts.append(_chart(runs, folder, "loss", "Loss", charts.loss, text))
    if any(entry.mean_average_precision is not None for run in runs for entry in run.validations):
        text = "Validation."
        title = "Mean average precision"
        parts.append(_chart(runs, folder, "precision", title, charts.precision, text))
    if validated or _known(runs, "error"):
        of_labels = all(run.is_multilabel for run in runs)
        what = "Share of all decisions that are wrong." if of_labels else "Top-1 unless said otherwise."
        text = f"Thin: training. Thick: validation. {what}"
        title = "Label error" if of_labels else "Error"
        parts.append(_chart(runs, folder, "error", title, charts.error, text))
    if _known(runs, "learning_rate"):
        parts.append(_chart(runs, folder, "learning_rate", "Learning rate", charts.learning_rate, ""))
    return page.section("Learning", page.grid(parts) or page.paragraph("No line of progress yet."))


def time_split(runs: list[RunLog], folder: Path) -> str:
    """Return the section on speed, the phases of a step and stragglers."""
    several = len(runs) > 1
    splits = [(run, split) for run in runs if (split := split_time(run))]
    parts = [_verdict(run, split, several) for run, split in splits]
    if splits and not several:
        parts.append(_chart(runs, folder, "time", "Time by phase", charts.time_split, ""))
    if _known(runs, "images_per_second"):
        parts.append(
            _chart(runs, folder, "images_per_second", "Speed", charts.speed, "All trainers together.")
        )
    waiting = [ranks(run, several) for run in runs]
    return page.section("Where the time goes", page.grid(parts), *waiting)


def filters(runs: list[RunLog], folder: Path) -> str:
    """Return the section of first-layer filters. A checkpoint that can't be read adds a note to its run."""
    parts = []
    for number, run in enumerate(runs):
        if run.checkpoint is None:
            continue
        try:
            first_layer = read_filters(run.checkpoint.path)
        except UserError as error:
            run.notes.append(str(error))
            continue
        if not first_layer:
            continue
        name, weights = first_layer
        sheet = draw_filters(weights)
        sheet.save(folder / f"filters{number or ''}.png")
        whose = f"{run.name}, " if len(runs) > 1 else ""
        text = f"{whose}{name} after epoch {run.checkpoint.state.epoch}: {len(weights)} filters of "
        text += f"{weights.shape[1]} x {weights.shape[2]}, each scaled by its largest weight; grey is zero."
        parts.append(
            page.paragraph(text, "muted") + page.image(sheet, "filters of the first layer", "filters")
        )
    return page.section("First-layer filters", *parts)


def augmentation(run: RunLog, folder: Path) -> str:
    """Return the contact sheet of a run's augmentation, if its dataset exists."""
    from lockstep.network.build import build_model, crop_size  # imports torch, which takes seconds

    try:
        config, _ = resolve([Layer(str(run.folder), run.config)])
        dataset = open_dataset(config)
        size = crop_size(build_model(config, dataset.n_classes), config, dataset.image_shape)
        sheet = draw_sheet(config, dataset, size)
    except UserError as error:
        run.notes.append(f"no sheet of augmented images: {error}")
        return ""
    sheet.save(folder / "augmented.png")
    text = f"{run.name}: training images as stored, and as the network sees them in epochs 1 to {N_DRAWS}."
    return page.section("Augmentation", page.paragraph(text, "muted"), page.image(sheet, "augmented images"))


def examples(run: RunLog, n_images: int) -> str:
    """Return the section of the most confused classes, by a test of the newest checkpoint on n_images."""
    if run.checkpoint is None or run.is_multilabel:  # several classes of an image are not confused
        return ""
    from lockstep.report.examples import try_examples  # imports torch, which takes seconds

    try:
        examples = try_examples(run.checkpoint, n_images)
    except UserError as error:
        run.notes.append(f"no examples of confused classes: {error}")
        return ""
    run.notes += examples.notes
    pairs = "".join(_pair(confusion) for confusion in examples.confusions)
    text = f"{run.name} after epoch {run.checkpoint.state.epoch}, {_tried(examples)}"
    return page.section(
        "Most confused classes",
        page.paragraph(text, "muted"),
        f'<div class="pairs">{pairs}</div>' if pairs else "",
    )


def configuration(runs: list[RunLog]) -> str:
    """Return the sections on keys, implementations, and versions and machine."""
    configs = [run.config for run in runs]
    implementations = [run.implementations for run in runs]
    made_with = [{**run.versions, **run.machine} for run in runs]
    titles = "Configuration", "Which way each part was computed", "Versions and machine"
    if len(runs) > 1:
        parts = [page.comparison(runs, values) for values in (configs, implementations, made_with)]
    else:
        parts = [
            page.keys(configs[0], _changed(runs[0])),
            page.keys(implementations[0]),
            page.keys(made_with[0]),
        ]
    return "".join(page.section(title, part) for title, part in zip(titles, parts, strict=True))


def _changed(run: RunLog) -> set[str]:
    """Return the keys that do not have their default."""
    return {key for key, value in run.config.items() if not is_default(key, value)}


def _known(runs: list[RunLog], value: str) -> bool:
    return any(getattr(point, value) is not None for run in runs for point in run.points)


def _chart(
    runs: list[RunLog],
    folder: Path,
    name: str,
    title: str,
    draw: Callable[[list[RunLog], int], Figure],
    caption: str,
) -> str:
    """Return a chart for wide and for narrow windows, and save it as <name>.png."""
    wide, narrow = draw(runs, drawing.WIDE), draw(runs, drawing.NARROW)
    theme.save_png(wide, folder / f"{name}.png")
    svg = theme.to_svg(wide, name, "wide", title) + theme.to_svg(narrow, f"{name}-narrow", "narrow", title)
    return page.figure(title, svg, caption)


def _verdict(run: RunLog, split: TimeSplit, named: bool) -> str:
    """Return the limit of the run as text and as a bar."""
    sentence, advice = explain(split, run.config)
    bar = legend = ""
    for phase, meaning in _PHASES.items():
        share, seconds = split.shares[phase], split.seconds_per_step
        bar += f'<span style="width: {share:.2%}; background: var(--{phase})"></span>'
        per_step = f", {charts.milliseconds(seconds * share)} per step" if seconds else ""
        if phase == "exchange" and split.bytes_per_step:
            per_step += f" for {split.bytes_per_step / 1e6:,.1f} MB"
        if phase == "exchange" and split.network_bytes_per_step:
            per_step += f", and {split.network_bytes_per_step / 1e6:,.1f} MB to other hosts"
        text = f"{phase} {charts.rough_percent(share)}{per_step}: {meaning}"
        legend += f"<li>{page.swatch(phase)}{escape(text)}</li>"
    name = f"<h3>{escape(run.name)}</h3>" if named else ""
    paragraphs = (
        page.paragraph("What limits this run", "muted")
        + page.paragraph(sentence, "first")
        + page.paragraph(advice)
    )
    bars = f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul>'
    return f'<div class="verdict">{name}{paragraphs}{bars}</div>'


def _tried(examples: "Examples") -> str:
    total, tried = f"{examples.n_there:,}", f"{examples.n_images:,}"
    text = f"tried on {f'all {total}' if tried == total else f'{tried} of {total}'} validation images: "
    text += f"{examples.n_wrong:,} wrong ({charts.percent(examples.n_wrong / examples.n_images)})."
    if examples.n_pairs > len(examples.confusions):
        text += f" The {len(examples.confusions)} most frequent of {examples.n_pairs:,} confusions."
    return text + (" Below each image: the network's probability for its answer." if examples.n_wrong else "")


def _pair(confusion: "Confusion") -> str:
    label, answer = escape(confusion.label), escape(confusion.answer)
    alt = f"{confusion.label} taken for {confusion.answer}"
    images = "".join(
        f"<div>{page.image(image, alt)}{probability:.0%}</div>" for image, probability in confusion.images
    )
    return (
        f'<div class="pair"><h3>{label} taken for {answer}</h3>'
        f'<div class="muted">{confusion.n_images:,} of {confusion.n_of_class:,} images of {label}</div>'
        f'<div class="images">{images}</div></div>'
    )
