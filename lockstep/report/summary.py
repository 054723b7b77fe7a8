"""A run's main figures as text."""

import statistics
import time
from collections import Counter
from typing import Any

from lockstep.backends.devices import on_gpus
from lockstep.config.tasks import MONITORED
from lockstep.report.charts import percent
from lockstep.report.runlog import RunLog, Validation

_PLACES = {"run_name", "weights_dir", "resume_train", "load_epoch"}


def state(run: RunLog, now: float) -> str:
    """Return the state of the run. now: seconds since 1970."""
    if run.exit_status is None:
        if run.last_time is None:
            return "not started"
        return f"not ended; its last line is {duration(max(0.0, now - run.last_time))} old"
    code = run.exit_status.get("code")
    if code == 0:
        return "complete"
    if code in (130, 143) and not run.exit_status.get("message"):
        return "stopped as asked"
    return f"ended with code {code}: {run.exit_status.get('message', '')}"


def lead(run: RunLog, now: float) -> str:
    """Return the line below the run's name."""
    config = run.config
    data = config.get("data") or config.get("train_folder") or config.get("data_folder", "its data")
    network = f"{config['model']} on {data}: " if "model" in config else ""
    return network + state(run, now)


def duration(seconds: float) -> str:
    """Format a duration: '23 s', '4 min 10 s', '2 h 05 min', '3 d 4 h'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def date(seconds: float) -> str:
    """Format seconds since 1970 as a local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def epochs(run: RunLog) -> str:
    """Return the validated epochs, such as '16 of 16'."""
    done = run.validations[-1].epoch if run.validations else 0
    return f"{done} of {run.config['n_epochs']}" if "n_epochs" in run.config else str(done)


def speed(run: RunLog) -> str:
    """Return the median of training images per second, or '-' if unknown."""
    rates = [point.images_per_second for point in run.points if point.images_per_second]
    return f"{statistics.median(rates):,.0f}" if rates else "-"


def devices(run: RunLog) -> tuple[str, str]:
    """Return the devices of all hosts, and the machine: ('2 x cpu', 'AMD EPYC, 16 cores')."""
    names = [str(name) for name in run.config.get("devices") or []]
    n_hosts = run.config.get("n_hosts", 1)
    n_hosts = n_hosts if isinstance(n_hosts, int) else 1
    counts = Counter("cuda" if on_gpus([name]) else "cpu" for name in names)
    kinds = ", ".join(f"{n_hosts * count} x {kind}" for kind, count in counts.items())
    models = dict.fromkeys(str(run.machine[name]) for name in names if name in run.machine)
    cores = [f"{run.machine['cores']} cores"] if "cores" in run.machine else []
    hosts = [f"on {n_hosts} hosts"] if n_hosts > 1 else []
    return kinds or "-", ", ".join([*hosts, *models, *cores])


def differences(runs: list[RunLog]) -> list[dict[str, Any]]:
    """Return each run's keys that differ among the runs, without names and folders."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _PLACES)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    differing = [key for key in keys if any(value != values[key][0] for value in values[key])]
    return [{key: run.config[key] for key in differing if key in run.config} for run in runs]


def _main_value(entry: Validation | None) -> str:
    value = None if entry is None else entry.error_top1
    if entry is not None and value is None:
        value = entry.mean_average_precision
    return "-" if value is None else percent(value)


def _further(entry: Validation) -> str:
    if entry.error_top5 is not None:
        return f", top-5 {percent(entry.error_top5)}"
    is_multilabel = entry.error_top1 is None and entry.macro_f1 is not None
    return f", macro F1 {percent(entry.macro_f1 or 0.0)}" if is_multilabel else ""


def tiles(run: RunLog) -> list[tuple[str, str, str]]:
    """Return (title, value, details) of the run's main figures."""
    best, last = run.best, run.validations[-1] if run.validations else None
    name, models = devices(run)
    what = "mAP" if run.is_multilabel else "validation error"
    by_default = run.monitor == MONITORED["multilabel" if run.is_multilabel else "classify"][0]
    title, reason = ("Best", "") if by_default else ("Best epoch's", f", by {run.monitor}")
    return [
        (f"{title} {what}", _main_value(best), f"epoch {best.epoch}{reason}" if best else ""),
        (f"Last {what}", _main_value(last), f"epoch {last.epoch}{_further(last)}" if last else ""),
        ("Training images/s", speed(run), "median"),
        ("Epochs", epochs(run), f"in {run.n_starts} starts" if run.n_starts > 1 else ""),
        ("Time", duration(run.seconds), date(run.last_time) if run.last_time else ""),
        ("Devices", name, models),
    ]
