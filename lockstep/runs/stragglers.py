"""The trainer for which the others wait, and why: the straggler.

Only durations are compared, since clocks of several hosts or GPUs have no common origin. In each step, the
trainer that waited least for the others was the last. Its cause is the phase in which it took longer than
the others' median.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.comm.messages import EpochTimes, RankTimes, Straggler

PHASES = ("load-wait", "compute", "barrier", "exchange")  # of a step, see docs/how-it-works.md
OTHER = "other"  # the cause of a wait that no phase explains: work between two steps
_NAMED = 0.5, 0.05  # shares of steps and of time above which a trainer is named
_STILL_NAMED = 0.4, 0.03  # above which it stays named, so that the name does not flicker
_DEVIATIONS = 3.0  # standard deviations by which the number of steps exceeds that of equal trainers
_EXPLAINED = 0.5  # least share of the wait that the cause explains

BRIEF = {
    "load-wait": "its loader",
    "compute": "its compute",
    "exchange": "its exchange",
    OTHER: "work between its steps",
}
CAUSES = {
    "load-wait": (
        "Its loader is slow: its disk or network share is slow, its images take longer to decode, or too few "
        "cores are left for the loaders. Raise read_threads or n_slots, lower cpu_threads, or move the data "
        "to a local disk."
    ),
    "compute": (
        "Its device computes longer: another process uses the same core or GPU, the device is throttled by "
        "heat or power, or the devices are unequal. Check with top or nvidia-smi and stop the other process; "
        "for unequal devices set logical_ranks and shares: auto."
    ),
    "exchange": (
        "Its copies to and from the others are slow: its memory is on another NUMA node or its GPU behind a "
        "slower PCIe link. Set pin_cores: true, or use devices that `nvidia-smi topo -m` shows close to each "
        "other. With rule: gradients the optimizer's step is in this time too."
    ),
    OTHER: (
        "It is busy between its steps: trainer 0 writes checkpoints and reports, and a machine that swaps or "
        "suspends a process stops it anywhere. Save less often, and check the free memory."
    ),
}


def measure(times: np.ndarray, n_hosts: int = 1) -> EpochTimes:
    """Return who was last in how many steps, and how long the others waited. The epoch is 0.

    Args:
        times: Seconds, float64 (trainers, steps, PHASES); at least one step.
        n_hosts: The number of hosts. With several, the exchange contains the waiting for other hosts, so it
            counts as waiting, and is no cause.
    """
    n_ranks, n_steps, _ = times.shape
    waiting = [PHASES.index(phase) for phase in waiting_phases(n_hosts)]
    waits = times[:, :, waiting].sum(2)
    last = waits.argmin(0)
    ranks = []
    for rank in range(n_ranks):
        mine = np.flatnonzero(last == rank)
        waited, beyond = _compare(times[:, mine], waits[:, mine], rank)
        excess = {phase: beyond[place] for place, phase in enumerate(PHASES) if place not in waiting}
        seconds = dict(zip(PHASES, times[rank].sum(0).tolist(), strict=True))
        ranks.append(RankTimes(rank, len(mine), waited, excess, seconds))
    measured = EpochTimes(0, n_steps, float(times.sum() / n_ranks), ranks, n_hosts=n_hosts)
    return replace(measured, straggler=straggler_of(measured))


def _compare(times: np.ndarray, waits: np.ndarray, rank: int) -> tuple[float, list[float]]:
    """Return how long another trainer, on average, waits for one, and the latter's excess by phase.

    Args:
        times: Seconds (trainers, steps, PHASES) of the steps in which it is the last.
        waits: Seconds (trainers, steps) of waiting in them.
        rank: Of the one.
    """
    others = np.sort(np.delete(times, rank, axis=0), axis=0)
    if not others.size:
        return 0.0, [0.0] * len(PHASES)
    n_others, own = len(others), waits[rank].sum()
    waited = (waits.sum() - own) / n_others - own
    median = (others[(n_others - 1) // 2] + others[n_others // 2]) / 2  # np.median takes ten times as long
    return float(waited), (times[rank] - median).sum(0).tolist()


def added(parts: Sequence[EpochTimes]) -> EpochTimes:
    """Return the sums of parts, with the epoch of the last one. All have as many trainers and hosts."""
    ranks = [_added_ranks([part.ranks[place] for part in parts]) for place in range(len(parts[0].ranks))]
    n_steps, seconds = sum(part.n_steps for part in parts), sum(part.seconds for part in parts)
    total = EpochTimes(parts[-1].epoch, n_steps, seconds, ranks, n_hosts=parts[0].n_hosts)
    return replace(total, straggler=straggler_of(total))


def _added_ranks(parts: Sequence[RankTimes]) -> RankTimes:
    first = parts[0]
    return RankTimes(
        first.rank,
        sum(part.n_last for part in parts),
        sum(part.waited for part in parts),
        {phase: sum(part.excess[phase] for part in parts) for phase in first.excess},
        {phase: sum(part.seconds[phase] for part in parts) for phase in first.seconds},
    )


def straggler_of(times: EpochTimes, former: Straggler | None = None) -> Straggler | None:
    """Return the trainer that makes the others wait notably, or None.

    It is the last in more than half of the steps and more often than chance explains. The others wait for
    it, beyond what it waits for them, more than 5 % of the time: noise that hits all trainers cancels out.

    Args:
        times: The measured steps.
        former: The straggler of the steps before, which stays one down to 40 % and 3 %.
    """
    slowest = max(times.ranks, key=lambda each: each.waited, default=None)
    if slowest is None or not times.n_steps or times.seconds <= 0:
        return None
    last_share, wait_share = slowest.n_last / times.n_steps, slowest.waited / times.seconds
    is_former = former is not None and former.rank == slowest.rank
    least_last, least_wait = _STILL_NAMED if is_former else _NAMED
    chance = 0.0 if is_former else _chance(times.n_steps, len(times.ranks))
    is_last_often = last_share > least_last and slowest.n_last >= chance
    if not is_last_often or _wait_beyond(times, slowest.rank) <= least_wait * times.seconds:
        return None
    return Straggler(slowest.rank, name_of(slowest.rank, times), last_share, wait_share, _cause(slowest))


def _wait_beyond(times: EpochTimes, rank: int) -> float:
    """Return by how many seconds the others, on average, waited longer than a trainer."""
    phases = waiting_phases(times.n_hosts)
    waits = [sum(each.seconds[phase] for phase in phases) for each in times.ranks]
    own = waits.pop(rank)
    return sum(waits) / len(waits) - own if waits else 0.0


def name_of(rank: int, times: EpochTimes) -> str:
    """Return a trainer's name for people: 'trainer 1', or over several hosts 'trainer 1 of host 0'."""
    if times.n_hosts == 1:
        return f"trainer {rank}"
    host, local_rank = divmod(rank, len(times.ranks) // times.n_hosts)
    return f"trainer {local_rank} of host {host}"


def waiting_phases(n_hosts: int) -> tuple[str, ...]:
    """Return the phases in which a trainer waits for others, which can't be the cause of a wait."""
    return ("barrier",) if n_hosts == 1 else ("barrier", "exchange")


def _chance(n_steps: int, n_ranks: int) -> float:
    """Return the number of steps that a trainer equal to the others is the last in by chance, at most."""
    share = 1 / n_ranks
    return float(n_steps * share + _DEVIATIONS * (n_steps * share * (1 - share)) ** 0.5)


def _cause(times: RankTimes) -> str:
    phase = max(times.excess, key=lambda each: times.excess[each])
    return phase if times.excess[phase] >= _EXPLAINED * times.waited else OTHER


def describe(straggler: Straggler) -> str:
    """Return a short line: 'trainer 1 last in 92% of steps, others wait 31% (its loader)'."""
    return (
        f"{straggler.name} last in {straggler.last_share:.0%} of steps, "
        f"others wait {straggler.wait_share:.0%} ({BRIEF[straggler.cause]})"
    )


def sentence_of(straggler: Straggler) -> str:
    """Return the same as a sentence."""
    return (
        f"{straggler.name.capitalize()} was the last in {straggler.last_share:.0%} of the steps, and the "
        f"others waited {straggler.wait_share:.0%} of the time for it, because of {BRIEF[straggler.cause]}."
    )
