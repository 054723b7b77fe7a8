"""Writes the report: draws what there is to draw, leaves out what a run has not got to yet."""

import time
from collections.abc import Callable
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from lockstep.errors import UserError
from lockstep.report import charts, page, summary, theme
from lockstep.report.confusion import Confusion
from lockstep.report.diagnosis import TimeSplit, explain, split_time
from lockstep.report.filters import draw_filters, read_filters
from lockstep.report.runlog import RunLog
from lockstep.runfolder import write_text

_PHASES = {
    "compute": "forward, backward, update",
    "exchange": "averaging with the other trainers",
    "meet": "waiting for the other trainers",
    "load-wait": "waiting for a minibatch",
}


def write_report(runs: list[RunLog], n_images: int) -> Path:
    """Writes report.html and report/*.png into the first run's folder; returns the path of the page.

    n_images: validation images to try the first run's network on; 0: none. What could not be used is added to
    the runs' notes. Raises UserError where nothing can be written there.
    """
    theme.apply()
    folder = runs[0].folder
    try:
        (folder / "report").mkdir(exist_ok=True)
        sections = _Sections(runs, folder / "report")
        parts = [
            sections.learning(),
            sections.time(),
            sections.filters(),
            sections.examples(n_images) if n_images else "",
            sections.configuration(),
        ]
    except OSError as error:
        raise UserError(f"{folder}: the report can't be written: {error.strerror}") from error
    now = time.time()
    top = page.tiles(runs[0]) if len(runs) == 1 else page.runs_table(runs, now)
    notes = page.notes([note for run in runs for note in run.notes])
    title = " · ".join(run.name for run in runs)
    lead = _lead(runs[0], now) if len(runs) == 1 else f"{len(runs)} runs"
    footer = f"Written {summary.date(now)} by python -m lockstep.report; the charts are in {folder.name}/report too."
    write_text(folder / "report.html", page.whole_page(title, lead, [top, notes, *parts], footer))
    return folder / "report.html"


def _lead(run: RunLog, now: float) -> str:
    network = (
        f"{run.config['model']} on {run.config.get('data_folder', 'its data')}, "
        if "model" in run.config
        else ""
    )
    return f"{network}{summary.state(run, now)}"


class _Sections:
    """The page's sections. pictures: the folder of the PNG files."""

    def __init__(self, runs: list[RunLog], pictures: Path) -> None:
        self._runs, self._pictures = runs, pictures

    def learning(self) -> str:
        several = len(self._runs) > 1
        who = (
            "Thin: training. With dots: validation."
            if several
            else "Training: since the line of progress before."
        )
        parts = [
            self._chart("cost", "Cost", charts.cost, who, self._has("cost") or self._validated()),
            self._chart(
                "error",
                "Error",
                charts.error,
                "Top-1, if not said otherwise.",
                self._has("error") or self._validated(),
            ),
            self._chart(
                "learning_rate", "Learning rate", charts.learning_rate, "", self._has("learning_rate")
            ),
        ]
        if not any(parts):
            return page.section("Learning", page.paragraph("No line of progress yet."))
        return page.section("Learning", f'<div class="grid">{"".join(parts)}</div>')

    def time(self) -> str:
        splits = [split_time(run) for run in self._runs]
        parts = [
            _verdict(run, split, len(self._runs) > 1)
            for run, split in zip(self._runs, splits, strict=True)
            if split
        ]
        if any(splits):
            draw = (
                (lambda runs, width: charts.time_split(runs[0], width))
                if len(splits) == 1
                else charts.time_bars
            )
            parts.append(self._chart("time", "Time by phase", draw, "", True))
        parts.append(
            self._chart(
                "images_per_second",
                "Speed",
                charts.speed,
                "All trainers together.",
                self._has("images_per_second"),
            )
        )
        return page.section(
            "Where the time goes", f'<div class="grid">{"".join(parts)}</div>' if any(parts) else ""
        )

    def filters(self) -> str:
        parts = []
        for number, run in enumerate(self._runs):
            if run.checkpoint is None:
                continue
            try:
                found = read_filters(run.checkpoint.path)
            except UserError as error:
                run.notes.append(str(error))
                continue
            if found:
                name, weights = found
                sheet = draw_filters(weights)
                sheet.save(self._pictures / f"filters{number or ''}.png")
                text = f"{run.name}: " if len(self._runs) > 1 else ""
                text += f"{name} after epoch {run.checkpoint.state.epoch}, {len(weights)} filters of {weights.shape[1]} × "
                text += f"{weights.shape[2]} pixels, each scaled by its largest weight; grey is zero."
                parts.append(
                    page.paragraph(text, "muted") + page.image(sheet, "filters of the first layer", "filters")
                )
        return page.section("First-layer filters", *parts)

    def examples(self, n_images: int) -> str:
        run = self._runs[0]
        if run.checkpoint is None:
            return ""
        from lockstep.report.examples import try_examples  # torch, which takes seconds to import

        try:
            found = try_examples(run.checkpoint, n_images)
        except UserError as error:
            run.notes.append(f"no examples of confused classes: {error}")
            return ""
        images = (
            f"all {found.n_there:,}"
            if found.n_images == found.n_there
            else f"{found.n_images:,} of {found.n_there:,}"
        )
        text = f"{run.name}, epoch {run.checkpoint.state.epoch}, tried on {images} validation images: "
        text += f"{found.n_wrong:,} wrong ({charts.percent(found.n_wrong / found.n_images)})"
        n_shown = len(found.confusions)
        text += (
            f"; the {n_shown} most frequent of {found.n_pairs:,} confusions."
            if found.n_pairs > n_shown
            else "."
        )
        text += " Under each picture: the probability that the network gave its answer." if n_shown else ""
        pairs = "".join(_pair(confusion) for confusion in found.confusions)
        return page.section(
            "Most confused classes", page.paragraph(text, "muted"), f'<div class="pairs">{pairs}</div>'
        )

    def configuration(self) -> str:
        if len(self._runs) == 1:
            run = self._runs[0]
            return page.section("Configuration", page.keys(run.config)) + page.section(
                "Versions and machine", page.keys({**run.versions, **run.machine})
            )
        made_with = [{**run.versions, **run.machine} for run in self._runs]
        configs = [run.config for run in self._runs]
        return page.section("Configuration", page.comparison(self._runs, configs)) + page.section(
            "Versions and machine", page.comparison(self._runs, made_with)
        )

    def _has(self, value: str) -> bool:
        return any(getattr(point, value) is not None for run in self._runs for point in run.points)

    def _validated(self) -> bool:
        return any(run.validations for run in self._runs)

    def _chart(
        self, name: str, title: str, draw: Callable[[list[RunLog], int], Figure], caption: str, there: bool
    ) -> str:
        """Draws for wide and narrow windows, and the PNG. Empty where there is nothing to draw."""
        if not there:
            return ""
        wide = draw(self._runs, charts.WIDE)
        theme.save_png(wide, self._pictures / f"{name}.png")
        drawings = [theme.to_svg(wide, name, "wide", f"chart: {title}")]
        drawings.append(
            theme.to_svg(draw(self._runs, charts.NARROW), f"{name}-narrow", "narrow", f"chart: {title}")
        )
        return page.figure(title, "\n".join(drawings), caption)


def _verdict(run: RunLog, split: TimeSplit, named: bool) -> str:
    """What limits the run, in words and in a bar."""
    sentence, advice = explain(split, run.config)
    per_step = split.seconds_per_step
    bar = legend = ""
    for phase, meaning in _PHASES.items():
        share = split.shares[phase]
        bar += f'<span style="width: {share:.2%}; background: var(--{phase})"></span>'
        time_text = f", {per_step * share * 1e3:,.3g} ms a step" if per_step else ""
        legend += (
            f"<li>{page.swatch(phase)}{phase} {charts.percent(share)}{time_text}: {escape(meaning)}</li>"
        )
    name = f"<h3>{escape(run.name)}</h3>" if named else ""
    first = page.paragraph(sentence, "first")
    return (
        f'<div class="verdict">{name}{first}{page.paragraph(advice)}'
        f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul></div>'
    )


def _pair(confusion: Confusion) -> str:
    n_images, n_of_class = confusion.n_images, confusion.n_of_class
    pictures = "".join(
        f"<div>{page.image(picture, f'{confusion.label} taken for {confusion.answer}')}{probability:.0%}</div>"
        for picture, probability in confusion.pictures
    )
    return (
        f'<div class="pair"><h3>{escape(confusion.label)} → {escape(confusion.answer)}</h3>'
        f'<div class="muted">{n_images:,} of {n_of_class:,} images of {escape(confusion.label)}</div>'
        f'<div class="pictures">{pictures}</div></div>'
    )
