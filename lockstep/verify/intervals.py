"""The intervals between receipts that are replayed, and the reasons for which a replay may differ."""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lockstep.errors import UserError
from lockstep.runs.receipts import Basis, Receipt


@dataclass(frozen=True)
class Replay:
    """Training again from one checkpoint.

    Attributes:
        start: The checkpoint's file of tensors; None from scratch.
        first: The step at which it begins.
        states: The state that is expected after each step that has a receipt, in order.
    """

    start: Path | None
    first: int
    states: Mapping[int, Receipt]

    @property
    def last(self) -> int:
        """The step at which it ends."""
        return max(self.states)


def check_settings(folder: Path, receipts: Sequence[Receipt], settings: str) -> None:
    """Raise UserError if no receipt of the run was made with these settings."""
    if all(receipt.settings != settings for receipt in receipts):
        raise UserError(
            f"{folder}: none of its receipts was made with these settings: leave out the keys that change "
            "results"
        )


def all_intervals(receipts: Sequence[Receipt], basis: Basis) -> list[tuple[Receipt, Receipt]]:
    """Return the pairs of neighbouring receipts of one process, of these settings and data."""
    return [
        (one, other)
        for one, other in pairwise(receipts)
        if other.kind != "start" and other.step > one.step and one.basis == other.basis == basis
    ]


def choose(
    folder: Path, receipts: Sequence[Receipt], basis: Basis, number: int, dice: random.Random
) -> tuple[list[Replay], int]:
    """Return replays that cover random intervals, and how many intervals can be replayed.

    Args:
        folder: The run's folder.
        receipts: All of the run.
        basis: The settings and data to replay with.
        number: How many intervals to choose.
        dice: The source of the choice.

    Raises:
        UserError: No interval can be replayed.
    """
    intervals = all_intervals(receipts, basis)
    if not intervals:
        raise UserError(
            f"{folder}: there is no interval between two receipts of this dataset to replay: train with a "
            "smaller check_every or snapshot_freq, or go without --replay"
        )
    starts = _starts(folder, receipts, basis)
    steps = sorted(starts)
    befores = [(bisect_right(steps, one.step), other.step) for one, other in intervals]
    possible = [(steps[place - 1], last) for place, last in befores if place]
    if not possible:
        raise UserError(
            f"{folder}: has no checkpoint before step {intervals[-1][0].step} to replay from: keep more of "
            "them (keep_checkpoints: null)"
        )
    ends: dict[int, int] = {}
    for first, last in dice.sample(possible, min(number, len(possible))):
        ends[first] = max(ends.get(first, 0), last)
    replays = [_replay(receipts, basis, first, starts[first], ends[first]) for first in sorted(ends)]
    return replays, len(possible)


def from_scratch(folder: Path, receipts: Sequence[Receipt], basis: Basis, step: int) -> Replay:
    """Return the replay of the whole run up to a step.

    Raises:
        UserError: The run has other settings or data at its beginning, or no receipt up to that step.
    """
    known = [receipt.step for receipt in receipts if receipt.basis == basis and receipt.step <= step]
    if not known or not receipts[0].begins_run or receipts[0].basis != basis:
        raise UserError(
            f"{folder}: its receipts do not begin at step 0 with the settings of config.yaml and this "
            f"dataset, so steps 0 to {step} can't be replayed: use --replay"
        )
    return _replay(receipts, basis, 0, None, max(known))


def _starts(folder: Path, receipts: Sequence[Receipt], basis: Basis) -> dict[int, Path | None]:
    """Return the steps at which a replay can start, with their checkpoints; None from scratch."""
    begins_here = receipts[0].begins_run and receipts[0].basis == basis
    found: dict[int, Path | None] = {0: None} if begins_here else {}
    paths: dict[str, Path] = {}  # by state: a run that was resumed with other keys or data counts steps anew
    for receipt in receipts:
        path = folder / "checkpoints" / f"{receipt.checkpoint}.safetensors"
        if receipt.checkpoint and path.exists():
            paths[receipt.state] = path
        if receipt.step and receipt.basis == basis and receipt.state in paths:
            found.setdefault(receipt.step, paths[receipt.state])
    return found


def _replay(receipts: Sequence[Receipt], basis: Basis, first: int, start: Path | None, last: int) -> Replay:
    states = {
        receipt.step: receipt
        for receipt in receipts
        if first <= receipt.step <= last and receipt.basis == basis
    }
    return Replay(start, first, dict(sorted(states.items())))


def reasons(receipt: Receipt, versions: Mapping[str, str], machine: Mapping[str, str]) -> list[str]:
    """Return what differs between a receipt's making and this replay: code versions, then the machine."""
    pairs = [("version of", receipt.versions, versions), ("machine's", receipt.machine, machine)]
    return [
        f"{kind} {name}: {then.get(name, 'none')} then, {now.get(name, 'none')} now"
        for kind, then, now in pairs
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
