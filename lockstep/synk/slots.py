"""Slots of shared variables in shared blocks, and the steps of collectives, which work on them."""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.exchange import shard
from lockstep.exchange.reduction import reduce_arrays
from lockstep.synk.blocks import arrange
from lockstep.synk.context import Barrier, CommandStep, RankContext, no_decision
from lockstep.synk.results import REDUCE_OPS, check_reducible, fractions, normalise_op
from lockstep.synk.shareds import BlockSlot, Shared
from lockstep.synk.team import Team

Shape = tuple[int, ...]


def make_slots(team: Team, sizes: Sequence[int], what: str) -> list[BlockSlot]:
    """Return slots of these sizes in bytes, in one new block per rank."""
    offsets, n_bytes = arrange(sizes)
    blocks: list[int] = []
    try:
        for _ in range(team.size):
            blocks.append(team.allocate(n_bytes, what))
    except (MemoryError, OSError):
        team.release(*blocks)
        raise
    exclusive = len(sizes) == 1
    return [
        BlockSlot(tuple(blocks), offset, size, exclusive) for offset, size in zip(offsets, sizes, strict=True)
    ]


def find_slots(team: Team, shareds: Sequence[Shared], sizes: Sequence[int]) -> tuple[BlockSlot, ...]:
    """Return slots of at least these sizes: the variables' own if they are large enough, else new ones."""
    found: list[BlockSlot] = []
    try:
        for shared, size in zip(shareds, sizes, strict=True):
            if shared.slot is not None and shared.slot.n_bytes >= size:
                found.append(shared.slot)
            else:
                found += make_slots(team, [size], f"shared variable {shared.name!r}")
    except (MemoryError, OSError):
        release_unused(team, shareds[: len(found)], found)
        raise
    return tuple(found)


def find_memory(team: Team) -> dict[range, str]:
    """Return the names of the shared variables by the addresses of their values in this process."""
    found = {}
    for shared in team.context.shareds.values():
        if shared.slot is not None:
            first = shared.view(team.context.blocks, team.rank, (0,)).ctypes.data
            found[range(first, first + shared.slot.n_bytes)] = shared.name
        if hasattr(shared.parts[0], "data_ptr"):  # a tensor, which may have left its slot
            first = shared.parts[0].data_ptr()
            found[range(first, first + shared.n_bytes)] = shared.name
    return found


def release_unused(team: Team, shareds: Sequence[Shared], previous: Sequence[BlockSlot | None]) -> None:
    """Release the blocks of slots that variables no longer use, unless other slots share the blocks."""
    for shared, slot in zip(shareds, previous, strict=True):
        if slot is not None and slot is not shared.slot and slot.exclusive:
            team.release(*slot.blocks)


@dataclass(frozen=True)
class MoveToSlots(CommandStep):
    """Step: copy the variables' values to their slots, and return their shapes by variable.

    Attributes:
        slots: New slots, or None to keep the current ones.
        only: The one rank that copies its values, or None for all.
    """

    numbers: tuple[int, ...]
    slots: tuple[BlockSlot, ...] | None = None
    only: int | None = None

    def blocks(self) -> Iterable[int]:
        return (number for slot in self.slots or () for number in slot.blocks)

    def run(self, context: RankContext) -> list[tuple[int, ...]]:
        shareds = [context.shareds[number] for number in self.numbers]
        for shared, slot in zip(shareds, self.slots or (), strict=self.slots is not None):
            shared.slot = slot
        if self.only is not None and context.rank != self.only:
            return []
        return [shared.move_to_slot(context.blocks, context.rank) for shared in shareds]


@dataclass(frozen=True)
class UseSlots(CommandStep):
    """Step: make the arrays in these slots the variables' values; they were written there before.

    Attributes:
        shapes: Shape of each variable by rank.
        missing: Indices of the parts of each variable without a value.
        only: The one rank whose values change, or None for all.
    """

    numbers: tuple[int, ...]
    slots: tuple[BlockSlot, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    missing: tuple[frozenset[int], ...]
    only: int | None = None

    def blocks(self) -> Iterable[int]:
        return (number for slot in self.slots for number in slot.blocks)

    def run(self, context: RankContext) -> None:
        shareds = [context.shareds[number] for number in self.numbers]
        for shared, slot in zip(shareds, self.slots, strict=True):  # all of them before a value is refused
            shared.slot = slot
        if self.only not in (None, context.rank):
            return
        for shared, shapes, missing in zip(shareds, self.shapes, self.missing, strict=True):
            shared.put(shared.view(context.blocks, context.rank, shapes[context.rank]))
            shared.set_parts_without_value(missing)


@dataclass(frozen=True)
class ReadShapes(CommandStep):
    """Step: return the shapes of the variables' values on this rank."""

    numbers: tuple[int, ...]

    def run(self, context: RankContext) -> list[tuple[int, ...]]:
        return [context.shareds[number].shape for number in self.numbers]


@dataclass(frozen=True)
class _State:
    """A variable on one rank before it is reduced.

    Attributes:
        rows: Number of rows of the call that last updated it.
        missing: Indices of the parts without a value.
    """

    shape: Shape
    rows: int
    missing: frozenset[int]


@dataclass(frozen=True)
class _Decision:
    """The next action of all ranks: move the values to new slots, or reduce with these weights.

    Attributes:
        missing: Indices of the parts of each variable that have a value on no rank.
    """

    slots: tuple[BlockSlot, ...] | None
    weights: tuple[list[float] | None, ...] = ()
    missing: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True)
class AllReduceShared(CommandStep):
    """Step: rank r reduces shard r of all ranks' values and writes it to all of them.

    Attributes:
        by_rows: Weight ranks by their rows in the call that last updated the variable.
    """

    numbers: tuple[int, ...]
    op: str
    by_rows: bool
    writes_to_others: ClassVar[bool] = True

    def run(self, context: RankContext) -> Generator[Barrier, Any, None]:
        shareds = [context.shareds[number] for number in self.numbers]
        while True:
            decision = yield self.decide, [self._describe(context, shared) for shared in shareds]
            if decision.slots is None:
                break
            for shared, slot in zip(shareds, decision.slots, strict=True):
                shared.slot = slot
        for shared, weights in zip(shareds, decision.weights, strict=True):
            if shared.reduces_on_device:
                weight = None if weights is None else weights[context.rank]
                shared.all_reduce_on_device(REDUCE_OPS[self.op], weight)
            else:
                self._reduce(context, shared, weights)
        mirrored = [shared for shared in shareds if context.gpu is not None and not shared.reduces_on_device]
        if mirrored:
            yield no_decision, None  # all ranks have reduced their shards
            for shared in mirrored:
                shared.put(shared.view(context.blocks, context.rank, shared.shape))
        for shared, missing in zip(shareds, decision.missing, strict=True):
            shared.set_parts_without_value(missing)

    def _describe(self, context: RankContext, shared: Shared) -> _State:
        """Move the value to its slot, or prepare it to be reduced on a GPU, and describe it."""
        missing = shared.parts_without_value()
        if shared.reduces_on_device:
            shared.prepare_all_reduce()
            return _State(shared.shape, shared.rows, missing)
        return _State(shared.move_to_slot(context.blocks, context.rank), shared.rows, missing)

    def decide(self, team: Team, contributions: list[list[_State]]) -> _Decision:
        """Decide for all ranks, in the caller; raise ValueError if shapes differ."""
        shareds = [team.context.shareds[number] for number in self.numbers]
        by_variable = list(zip(*contributions, strict=True))
        for shared, states in zip(shareds, by_variable, strict=True):
            check_equal(shared, [state.shape for state in states], f"all_reduce {self.op}")
            if self.by_rows and not any(shared in each.updated for each in team.context.programs.values()):
                raise ValueError(
                    f"all_reduce: no function has {shared.name!r} in its updates, so its number of rows is "
                    "not known. Add it there, or leave out by_rows"
                )
        sizes = [shared.n_bytes for shared in shareds]
        slots = find_slots(team, shareds, sizes)
        if any(slot is not shared.slot for slot, shared in zip(slots, shareds, strict=True)):
            team.send_missing_blocks({number for slot in slots for number in slot.blocks})
            return _Decision(slots)
        return _Decision(
            None,
            tuple(self._weigh(shared, states) for shared, states in zip(shareds, by_variable, strict=True)),
            tuple(self._missing(states) for states in by_variable),
        )

    def _missing(self, states: Sequence[_State]) -> frozenset[int]:
        """Return the indices of the parts without a value on all ranks that count in the reduction."""
        return frozenset.intersection(*(state.missing for state in states if state.rows or not self.by_rows))

    def _weigh(self, shared: Shared, states: Sequence[_State]) -> list[float] | None:
        counts = [state.rows for state in states]
        if not self.by_rows:
            return None
        if not any(counts):
            raise ValueError(f"all_reduce: no rank had rows when {shared.name!r} was last updated")
        return fractions(counts)

    def _reduce(self, context: RankContext, shared: Shared, weights: list[float] | None) -> None:
        size = math.prod(shared.shape)
        first, last = shard((0, size), context.rank, context.size)
        if first == last:
            return
        flat = [shared.view(context.blocks, rank, (size,))[first:last] for rank in range(context.size)]
        if weights is None:
            reduce_arrays(flat, flat, REDUCE_OPS[self.op])
            return
        counted = [(part, weight) for part, weight in zip(flat, weights, strict=True) if weight]
        reduce_arrays([part for part, _ in counted], flat, "mean", [weight for _, weight in counted])


def make_all_reduce(shareds: Sequence[Shared], op: str, by_rows: bool) -> AllReduceShared:
    """Return the step after checking its arguments."""
    op = normalise_op(op, "all_reduce")
    if by_rows and op != "avg":
        raise ValueError(f"all_reduce: by_rows is for avg, not for {op}")
    for shared in shareds:
        check_reducible(op, shared.dtype, f"all_reduce: {shared.name!r}")
    return AllReduceShared(tuple(shared.number for shared in shareds), op, by_rows)


def check_equal(shared: Shared, shapes: Sequence[Shape], what: str) -> None:
    """Check that a variable has one shape on all ranks.

    Args:
        shared: The variable, which the message names.
        shapes: Its shape on each rank.
        what: The operation that needs equal shapes.

    Raises:
        ValueError: The shapes differ.
    """
    if any(shape != shapes[0] for shape in shapes):
        described = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
        raise ValueError(f"{what}: {shared.name!r} has unequal shapes: {described}")
