"""Large outputs of calls on GPUs: folded there, where that can be, and only then copied to host memory."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lockstep.synk.calling import Call
from lockstep.synk.commands import Meeting
from lockstep.synk.results import FOLD_OPS, Kept, RankPart, fractions, unpack

if TYPE_CHECKING:
    from lockstep.synk.here import Here
    from lockstep.synk.team import Team


@dataclass(frozen=True)
class FoldKept:
    """Step: folds output `number` of the last call on the ranks' GPUs. Gives it in the caller.

    weights: by rank, of a mean; None where they are equal, and for other modes.
    """

    number: int
    mode: str
    weights: tuple[float, ...] | None
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return ()

    def run(self, here: "Here") -> Generator[Meeting, Any, np.ndarray | None]:
        assert here.gpu is not None
        weight = None if self.weights is None else self.weights[here.rank]
        folded = here.gpu.kept.fold(self.number, FOLD_OPS[self.mode], weight)
        return here.gpu.fetch(folded) if here.is_caller else None
        yield  # a step is a generator, also where it meets nobody


@dataclass(frozen=True)
class FetchKept:
    """Step: copies output `number` of the last call to host memory, in the ranks that have it there."""

    number: int
    ranks: tuple[int, ...]
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return ()

    def run(self, here: "Here") -> Generator[Meeting, Any, RankPart]:
        assert here.gpu is not None
        return RankPart(0, [here.gpu.kept.fetch(self.number) if here.rank in self.ranks else None])
        yield  # a step is a generator, also where it meets nobody


def collect(
    team: "Team", call: Call, modes: Sequence[str | None], parts: list[RankPart]
) -> tuple[list[RankPart], dict[int, np.ndarray]]:
    """The parts with all that the ranks have kept fetched, and what they could fold, by place in the call."""
    folded: dict[int, np.ndarray] = {}
    for place, number in enumerate(call.outputs):
        values = [part.outputs[place] for part in parts]
        holders = tuple(rank for rank, value in enumerate(values) if isinstance(value, Kept))
        if not holders:
            continue
        mode = modes[number]
        assert mode is not None
        if len(holders) == team.size and len({value.shape for value in values}) == 1:
            weights = fractions([part.rows for part in parts]) if mode == "avg" else None
            step = FoldKept(number, mode, None if weights is None else tuple(weights))
            folded[place] = team.ask("folding an output", step)[0][team.rank]
        else:  # a rank without rows, or shapes that `combine` will complain about
            fetched = team.ask("fetching an output", FetchKept(number, holders))[0]
            for rank in holders:
                parts[rank].outputs[place] = unpack(fetched[rank], team.here.blocks).outputs[0]
    return parts, folded
