"""A run in a few figures, written for people."""

import statistics
import time

from lockstep.backends.devices import on_gpus
from lockstep.report.charts import percent
from lockstep.report.runlog import RunLog


def state(run: RunLog, now: float) -> str:
    """How the run stands. now: seconds since 1970."""
    if run.ending is None:
        if run.last_time is None:
            return "not started"
        return f"not ended; its last line is {duration(max(0.0, now - run.last_time))} old"
    code = run.ending.get("code")
    if code == 0:
        return "complete"
    if code in (130, 143) and not run.ending.get("message"):
        return "stopped as asked"
    return f"ended with code {code}: {run.ending.get('message', '')}"


def lead(run: RunLog, now: float) -> str:
    """The line below the run's name."""
    config = run.config
    network = f"{config['model']} on {config.get('data_folder', 'its data')}: " if "model" in config else ""
    return network + state(run, now)


def duration(seconds: float) -> str:
    """'23 s', '4 min 10 s', '2 h 05 min', '3 d 4 h'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def epochs(run: RunLog) -> str:
    """'16 of 16', counting those that are validated."""
    done = run.validations[-1].epoch if run.validations else 0
    return f"{done} of {run.config['n_epochs']}" if "n_epochs" in run.config else str(done)


def speed(run: RunLog) -> str:
    """Median of training images a second, '-' where it is not known."""
    rates = [point.images_per_second for point in run.points if point.images_per_second]
    return f"{statistics.median(rates):,.0f}" if rates else "-"


def devices(run: RunLog) -> tuple[str, str]:
    """('2 x cpu', 'AMD EPYC, 16 cores'); either may be empty."""
    names = [str(name) for name in run.config.get("devices") or []]
    kind = "cuda" if on_gpus(names[:1]) else "cpu"
    models = dict.fromkeys(str(run.machine[name]) for name in names if name in run.machine)
    cores = [f"{run.machine['cores']} cores"] if "cores" in run.machine else []
    return f"{len(names)} x {kind}" if names else "-", ", ".join([*models, *cores])


def tiles(run: RunLog) -> list[tuple[str, str, str]]:
    """(what, how much, more about it)."""
    best, last = run.best, run.validations[-1] if run.validations else None
    name, models = devices(run)
    top5 = f", top-5 {percent(last.error_top5)}" if last and last.error_top5 is not None else ""
    return [
        (
            "Best validation error",
            percent(best.error_top1) if best else "-",
            f"epoch {best.epoch}" if best else "",
        ),
        (
            "Last validation error",
            percent(last.error_top1) if last else "-",
            f"epoch {last.epoch}{top5}" if last else "",
        ),
        ("Training images/s", speed(run), "median"),
        ("Epochs", epochs(run), f"in {run.n_starts} starts" if run.n_starts > 1 else ""),
        ("Time", duration(run.seconds), date(run.last_time) if run.last_time else ""),
        ("Devices", name, models),
    ]
