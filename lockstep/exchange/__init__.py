"""Averaging the trainers' arenas after a step.

Rank r owns shard r. It reads shard r of all arenas, averages in fixed rank order, and writes the mean into
all of them. Nobody needs memory for a second copy, each rank moves 2 S (P - 1) / P bytes for an arena of S
bytes and P ranks, and since a shard is computed once and copied, replicas are bitwise equal afterwards for
any P. For SGD with momentum, averaging weights and momenta after every step is averaging gradients before it
(docs/how-it-works.md has the two lines of algebra).

A step: compute and update; `updated`; meet; `await_updates`; `average`; meet; `averaged`; compute. A meeting
orders the processes, not what their devices do: a device works through its stream behind its process's back.
The other three are where a device's work is tied to that of the others.
"""

from abc import ABC, abstractmethod

SHARD_ALIGNMENT = 16  # elements: 64 bytes of float32, so that no cache line has two writers


class Exchange(ABC):
    """One rank's part in averaging."""

    name: str

    @abstractmethod
    def updated(self) -> None:
        """Before the first meeting: what has been asked of the device so far is this rank's update."""

    @abstractmethod
    def await_updates(self) -> None:
        """After the first meeting: what is asked of the device from now on needs all ranks' updates."""

    @abstractmethod
    def average(self) -> None:
        """Replaces this rank's shard, in every arena, by its mean over all arenas."""

    @abstractmethod
    def averaged(self) -> None:
        """After the second meeting: what is asked of the device from now on needs every shard's mean."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the other ranks' memory, when this rank's device has done all that it was asked."""


def shard(n_elements: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """The elements [first, last) that `rank` averages. Shards are disjoint and cover everything."""

    def boundary(number: int) -> int:
        if number == n_ranks:
            return n_elements
        return n_elements * number // n_ranks // SHARD_ALIGNMENT * SHARD_ALIGNMENT

    return boundary(rank), boundary(rank + 1)
