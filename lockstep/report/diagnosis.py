"""The shares of a run's time, the phase that limits it, and the key to change."""

from dataclasses import dataclass
from typing import Any

from lockstep.backends.devices import on_gpus
from lockstep.report.runlog import RunLog
from lockstep.runs.stragglers import PHASES

_MUCH = 0.10  # share of time above which waiting or averaging calls for a change


@dataclass(frozen=True)
class TimeSplit:
    """The split of a run's time among its phases.

    Attributes:
        shares: The share of each phase; they add up to 1.
        seconds_per_step: None if unknown, like the next two.
        bytes_per_step: Bytes per step between the memory of trainer 0 and that of the others.
        network_bytes_per_step: Bytes per step from trainer 0 to other hosts.
        limit: The phase that limits the run.
    """

    shares: dict[str, float]
    seconds_per_step: float | None
    limit: str
    bytes_per_step: float | None = None
    network_bytes_per_step: float | None = None


def split_time(run: RunLog) -> TimeSplit | None:
    """Return the split over the later half of the run, without its warm-up, or None if no time is known."""
    known = [point for point in run.points if sum(point.seconds.values()) > 0]
    known = known[len(known) // 2 :]
    if not known:
        return None
    sums = {phase: sum(point.seconds.get(phase, 0.0) for point in known) for phase in PHASES}
    total = sum(sums.values())
    shares = {phase: seconds / total for phase, seconds in sums.items()}
    steps = [point.seconds_per_step for point in known if point.seconds_per_step is not None]
    lost = max(("load-wait", "barrier", "exchange"), key=lambda phase: shares[phase])
    limit = lost if shares[lost] > _MUCH else "compute"
    sizes = [point.bytes_per_step for point in known if point.bytes_per_step is not None]
    sent = [point.network_bytes_per_step for point in known if point.network_bytes_per_step is not None]
    return TimeSplit(shares, _mean(steps), limit, _mean(sizes), _mean(sent))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def explain(split: TimeSplit, config: dict[str, Any]) -> tuple[str, str]:
    """Return a sentence about the limit of the run, and one with advice."""
    share = f"{split.shares[split.limit]:.0%} of the time"
    gpus = on_gpus(config.get("devices") or [])
    if split.limit == "load-wait":
        return f"Loading: {share} is lost waiting for minibatches.", _loading(config)
    if split.limit == "barrier":
        advice = "Give all trainers the same kind of device and equal shares of the cores (cpu_threads), "
        return (
            f"Uneven steps: {share} is lost waiting for the slowest trainer of each.",
            advice + "and leave some to the loaders.",
        )
    if split.limit == "exchange":
        return f"Averaging: {share} goes into the exchange.", _exchange(config, gpus)
    return f"Computing, as it should be: {share} is forward, backward, update.", _computing(config, gpus)


def _loading(config: dict[str, Any]) -> str:
    if config.get("para_load") is False:
        return "Set para_load: true, so that a loader process prepares the next minibatch meanwhile."
    slots = f" ({config['n_slots']} now)" if "n_slots" in config else ""
    return (
        f"A larger n_slots{slots} helps where reading is uneven; otherwise a faster disk, "
        "or more cores for the loaders."
    )


def _exchange(config: dict[str, Any], gpus: bool) -> str:
    key = _batch_key(config)
    size = f" ({config[key]} now)" if key in config else ""
    advice = f"A larger {key}{size} means fewer exchanges an image"
    if gpus and config.get("exchange") != "p2p":
        return (
            f"{advice}; exchange: p2p is the fastest where GPUs reach each other (python -m lockstep.doctor)."
        )
    return f"{advice}; so do fewer trainers with more cores each."


def _computing(config: dict[str, Any], gpus: bool) -> str:
    if not gpus:
        return "Faster: more cores, a GPU, or a smaller network."
    knobs = []
    if config.get("precision") == "fp32":
        knobs.append("precision: tf32 or bf16")
    if not config.get("cuda_graph"):
        knobs.append("cuda_graph: true for small networks")
    return f"Faster: {', '.join([*knobs, f'a larger {_batch_key(config)}', 'more GPUs'])}."


def _batch_key(config: dict[str, Any]) -> str:
    """Return the key that decides how many images a step has."""
    return "global_batch_size" if config.get("global_batch_size") else "batch_size"
