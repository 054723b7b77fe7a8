"""The collective that all ranks work on: all_reduce. Each folds its shard and writes it to all."""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.exchange import shard
from lockstep.exchange.fold import fold_all
from lockstep.synk.commands import Meeting
from lockstep.synk.here import nothing_to_decide
from lockstep.synk.results import FOLD_OPS, check_foldable, fractions, normalise_op
from lockstep.synk.shareds import Place, Shared, make_room

if TYPE_CHECKING:
    from lockstep.synk.here import Here
    from lockstep.synk.team import Team

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Decision:
    """What all ranks do next in AllReduce: move to new places, or fold with these weights."""

    places: tuple[Place, ...] | None
    weights: tuple[list[float] | None, ...]


@dataclass(frozen=True)
class AllReduce:
    """Step: rank r folds shard r of all ranks' values and writes it to all of them.

    by_rows: ranks count by the rows of the call that last updated the variable.
    """

    numbers: tuple[int, ...]
    op: str
    by_rows: bool
    writes_to_others: ClassVar[bool] = True

    def blocks(self) -> Iterable[int]:
        return ()

    def run(self, here: "Here") -> Generator[Meeting, Any, None]:
        shareds = [here.shareds[number] for number in self.numbers]
        while True:
            word = [
                (shared.shape if shared.folds_on_gpu else shared.settle(here), shared.rows)
                for shared in shareds
            ]
            decision = yield self.decide, word
            if decision.places is None:
                break
            for shared, place in zip(shareds, decision.places, strict=True):
                shared.place = place
        for shared, weights in zip(shareds, decision.weights, strict=True):
            if shared.folds_on_gpu:
                weight = None if weights is None else weights[here.rank]
                shared.all_reduce_on_gpu(FOLD_OPS[self.op], weight)
            else:
                self._fold(here, shared, weights)
        mirrored = [shared for shared in shareds if here.gpu is not None and not shared.folds_on_gpu]
        if mirrored:
            yield nothing_to_decide, None  # all have folded
            for shared in mirrored:
                shared.put(shared.view(here, here.rank, shared.shape))

    def decide(self, team: "Team", words: list[list[tuple[Shape, int]]]) -> _Decision:
        """In the caller. Raises ValueError where shapes differ."""
        shareds = [team.here.shareds[number] for number in self.numbers]
        by_variable = list(zip(*words, strict=True))
        for shared, found in zip(shareds, by_variable, strict=True):
            check_equal(shared, [shape for shape, _ in found], f"all_reduce {self.op}")
        sizes = [shared.n_bytes for shared in shareds]
        places = make_room(team, shareds, sizes)
        if any(place is not shared.place for place, shared in zip(places, shareds, strict=True)):
            team.offer({number for place in places for number in place.blocks})
            return _Decision(places, ())
        return _Decision(
            None,
            tuple(self._weigh(shared, found) for shared, found in zip(shareds, by_variable, strict=True)),
        )

    def _weigh(self, shared: Shared, found: Sequence[tuple[Shape, int]]) -> list[float] | None:
        counts = [n_rows for _, n_rows in found]
        if not self.by_rows:
            return None
        if not any(counts):
            raise ValueError(f"all_reduce: no rank had rows when {shared.name!r} was last updated")
        return fractions(counts)

    def _fold(self, here: "Here", shared: Shared, weights: list[float] | None) -> None:
        size = math.prod(shared.shape)
        first, last = shard((0, size), here.rank, here.size)
        if first == last:
            return
        flat = [shared.view(here, rank, (size,))[first:last] for rank in range(here.size)]
        if weights is None:
            fold_all(flat, flat, FOLD_OPS[self.op])
            return
        counted = [(part, weight) for part, weight in zip(flat, weights, strict=True) if weight]
        fold_all([part for part, _ in counted], flat, "mean", [weight for _, weight in counted])


def make_all_reduce(shareds: Sequence[Shared], op: str, by_rows: bool) -> AllReduce:
    """The step, checked."""
    op = normalise_op(op, "all_reduce")
    if by_rows and op != "avg":
        raise ValueError(f"all_reduce: by_rows is for avg, not for {op}")
    for shared in shareds:
        check_foldable(op, shared.dtype, f"all_reduce: {shared.name!r}")
    return AllReduce(tuple(shared.number for shared in shareds), op, by_rows)


def check_equal(shared: Shared, shapes: Sequence[Shape], what: str) -> None:
    if any(shape != shapes[0] for shape in shapes):
        found = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
        raise ValueError(f"{what}: {shared.name!r} has unequal shapes: {found}")
