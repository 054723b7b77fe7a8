"""The report's part on trainers that wait for each other: a sentence, and a row of times for each trainer."""

from html import escape

from lockstep.comm.messages import EpochTimes, RankTimes
from lockstep.report import charts, page
from lockstep.report.runlog import RunLog
from lockstep.runs.stragglers import CAUSES, PHASES, name_of, sentence_of

_HEADS = ["Trainer", "Last in", "Others waited", *PHASES, "Shares of its time"]


def ranks(run: RunLog, named: bool) -> str:
    """Return who made the others wait, as HTML; '' if the log has no times of several trainers.

    Args:
        named: Whether to give the run's name, since there are several.
    """
    times = run.newest_times
    if times is None:
        return ""
    title = f"Who waits for whom: {run.name}" if named else "Who waits for whom"
    verdict = page.paragraph("No single trainer makes the others wait notably.")
    if times.straggler:
        verdict = page.paragraph(sentence_of(times.straggler), "first")
        verdict += page.paragraph(CAUSES[times.straggler.cause])
    table = "" if named else page.table(_HEADS, [_row(times, each) for each in times.ranks], range(1, 7))
    caption = "Times are per step. The last in a step is the trainer that waited least for the others"
    caption += "." if times.n_hosts == 1 else ", in barrier and exchange, since hosts wait in their exchange."
    return f"<h3>{escape(title)}</h3>{verdict}{table}{page.paragraph(caption, 'muted') if table else ''}"


def _row(times: EpochTimes, rank: RankTimes) -> list[str]:
    total = sum(rank.seconds.values()) or 1.0
    bar = "".join(
        f'<span style="width: {rank.seconds[phase] / total:.2%}; background: var(--{phase})"></span>'
        for phase in ("compute", "exchange", "barrier", "load-wait")
    )
    return [
        escape(name_of(rank.rank, times).removeprefix("trainer ")),
        f"{charts.rough_percent(rank.n_last / times.n_steps)} of {times.n_steps:,}",
        charts.rough_percent(rank.waited / times.seconds) if times.seconds else "-",
        *(charts.milliseconds(rank.seconds[phase] / times.n_steps) for phase in PHASES),
        f'<div class="bar rank">{bar}</div>',
    ]
