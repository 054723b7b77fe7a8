"""The logical ranks that each trainer computes: `shares` in the configuration."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.config import Config

Bounds = tuple[int, ...]  # trainer r computes the logical ranks [bounds[r], bounds[r + 1])
_MOST = 2  # times the equal share: the largest one that shares: auto may give


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Yield each key that can't work with `shares`, and the problem."""
    if config.shares == "equal":
        return
    if config.logical_ranks is None:
        yield "shares", "divides logical ranks: set logical_ranks and global_batch_size, or shares: equal"
        return
    if config.n_hosts > 1:
        yield "shares", f"is for one host: with {config.n_hosts} hosts set shares: equal"
    if isinstance(config.shares, str):
        return
    if min(config.shares, default=0) < 1:
        text = f"{list(config.shares)} leaves a trainer without work: give each at least 1"
        yield "shares", f"{text}, or use fewer devices"
    if sum(config.shares) != config.logical_ranks:
        total = f"{list(config.shares)} add up to {sum(config.shares)}"
        yield "shares", f"{total}, not to logical_ranks: {config.logical_ranks}: change one of them"


def check_devices(config: "Config") -> None:
    """Raise UserError if the trainers can't share the logical ranks."""
    n_logical, n_trainers = config.logical_ranks, config.n_trainers
    if n_logical is None:
        return
    if n_trainers > n_logical:
        raise UserError(
            f"logical_ranks: {n_trainers} trainers can't share {n_logical}: raise logical_ranks, or use "
            f"{n_logical} devices at most"
        )
    if not isinstance(config.shares, str) and len(config.shares) != n_trainers:
        raise UserError(
            f"shares: {list(config.shares)} are for {len(config.shares)} trainers, and the run has "
            f"{n_trainers}: give one number for each, or set shares: equal"
        )


def bounds_of(config: "Config") -> Bounds:
    """Return the logical ranks that each trainer computes at the start of a run.

    Args:
        config: A configuration with `logical_ranks` whose `devices` are filled in.
    """
    assert config.logical_ranks is not None
    if not isinstance(config.shares, str):
        return (0, *accumulate(config.shares))
    n_logical, n_trainers = config.logical_ranks, config.n_trainers
    return tuple(-(-n_logical * rank // n_trainers) for rank in range(n_trainers + 1))  # rounded up


def most_of(config: "Config") -> int:
    """Return the most logical ranks that a trainer ever computes in a step."""
    bounds = bounds_of(config)
    largest = max(last - first for first, last in pairwise(bounds))
    if config.shares != "auto":
        return largest
    return min(_MOST * largest, bounds[-1] - config.n_trainers + 1)


def share_of(start: int, stop: int, leaves: tuple[int, int], n_logical: int) -> tuple[int, int]:
    """Return the (start, stop) of consecutive logical ranks' share of a global batch.

    The shares of single logical ranks differ by one sample at most, and logical rank 0 always has a sample.

    Args:
        start, stop: Positions of the global batch.
        leaves: Logical ranks [first, last).
        n_logical: The number of all logical ranks.
    """
    first, last = (start + -(-(stop - start) * number // n_logical) for number in leaves)  # rounded up
    return first, last


def balance(seconds: Sequence[float], n_logical: int, most: int) -> Bounds:
    """Return the bounds with which the slowest trainer is done first.

    Args:
        seconds: The time that each trainer takes for one logical rank.
        n_logical: The number of all logical ranks.
        most: The largest share.
    """
    counts = [1] * len(seconds)
    for _ in range(n_logical - len(seconds)):
        free = [rank for rank, count in enumerate(counts) if count < most]
        counts[min(free, key=lambda rank: (counts[rank] + 1) * seconds[rank])] += 1
    return (0, *accumulate(counts))


def slowest(seconds: Sequence[float], bounds: Bounds) -> float:
    """Return the time in seconds after which the last trainer has computed its logical ranks."""
    shares = [last - first for first, last in pairwise(bounds)]
    return max(share * each for share, each in zip(shares, seconds, strict=True))
