"""Where a run's time goes, what limits it, and which knob to turn."""

from dataclasses import dataclass
from typing import Any

from lockstep.backends.devices import on_gpus
from lockstep.report.runlog import PHASES, RunLog

_MUCH = 0.10  # the share of the time above which waiting or averaging is worth a change


@dataclass(frozen=True)
class TimeSplit:
    """shares: of each phase, together 1. seconds_per_step, bytes_per_step: between trainer 0's memory and the
    others', network_bytes_per_step: from it to other hosts; None where the run does not tell.
    """

    shares: dict[str, float]
    seconds_per_step: float | None
    limit: str  # the phase to do something about
    bytes_per_step: float | None = None
    network_bytes_per_step: float | None = None


def split_time(run: RunLog) -> TimeSplit | None:
    """Over the later half of the run, when it has warmed up. None where no time is known."""
    known = [point for point in run.points if sum(point.seconds.values()) > 0]
    known = known[len(known) // 2 :]
    if not known:
        return None
    sums = {phase: sum(point.seconds.get(phase, 0.0) for point in known) for phase in PHASES}
    total = sum(sums.values())
    shares = {phase: seconds / total for phase, seconds in sums.items()}
    steps = [point.seconds_per_step for point in known if point.seconds_per_step is not None]
    lost = max(("load-wait", "meet", "exchange"), key=lambda phase: shares[phase])
    limit = lost if shares[lost] > _MUCH else "compute"
    sizes = [point.bytes_per_step for point in known if point.bytes_per_step is not None]
    sent = [point.network_bytes_per_step for point in known if point.network_bytes_per_step is not None]
    return TimeSplit(shares, _mean(steps), limit, _mean(sizes), _mean(sent))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def explain(split: TimeSplit, config: dict[str, Any]) -> tuple[str, str]:
    """What limits the run, and what to do about it: two sentences."""
    share = f"{split.shares[split.limit]:.0%} of the time"
    gpus = on_gpus(config.get("devices") or [])
    if split.limit == "load-wait":
        return f"Loading: {share} is lost waiting for minibatches.", _loading(config)
    if split.limit == "meet":
        advice = "Give all trainers the same kind of device and equal shares of the cores (cpu_threads), "
        return (
            f"Uneven trainers: {share} is lost waiting for the slowest.",
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
    size = f" ({config['batch_size']} now)" if "batch_size" in config else ""
    advice = f"A larger batch_size{size} means fewer exchanges a picture"
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
    return f"Faster: {', '.join([*knobs, 'a larger batch_size', 'more GPUs'])}."
