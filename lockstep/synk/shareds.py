"""Shared variables on all ranks, by number, and their places in blocks.

A variable that collectives can work on has a *place*: a block for each rank, mapped by all, and an offset.
Its value lies there as long as updates are in place; an update that makes a new array moves it out, and the
next collective moves it back in (`settle`).
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lockstep.exchange import Op
from lockstep.synk.blocks import Span, align
from lockstep.synk.commands import Meeting
from lockstep.synk.rows import Choice, excerpt

if TYPE_CHECKING:
    from lockstep.synk.here import Here
    from lockstep.synk.team import Team


@dataclass(frozen=True)
class Place:
    """Room for n_bytes in a block of every rank, at one offset. alone: nothing else is in these blocks."""

    blocks: tuple[int, ...]  # by rank
    offset: int
    n_bytes: int
    alone: bool

    def span(self, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Span:
        return Span(self.blocks[rank], dtype.str, shape, self.offset)


class Shared(ABC):
    """A shared variable in this process. Subclasses know what kind of variable it is."""

    kind: str  # that of the programs that can use it
    number: int
    name: str
    place: Place | None = None
    rows: int = 1  # of the call that last updated it here

    parts: list[Any]  # what the user has in hand: the variable, or the parameters that lie in it

    @abstractmethod
    def get(self) -> Any:
        """Its value, not a copy; a NumPy array where `is_array`."""

    @abstractmethod
    def put(self, value: Any) -> None:
        """Makes an array its value. No copy."""

    def become_own(self, rank: int) -> None:
        """A random stream becomes this rank's own; other variables stay what they are."""
        return

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its value, which is an array."""
        found: np.dtype[Any] = self.get().dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its value, which is an array."""
        found: tuple[int, ...] = self.get().shape
        return found

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_array(self) -> bool:
        """Whether its value can lie in a block."""
        value = self.get()
        return isinstance(value, np.ndarray) and not value.dtype.hasobject

    def view(self, here: "Here", rank: int, shape: tuple[int, ...]) -> np.ndarray:
        """The array at its place in a rank's block."""
        assert self.place is not None, f"{self.name} has no place"
        return here.blocks.array(self.place.span(rank, self.dtype, shape))

    def assign(self, value: np.ndarray) -> None:
        """Gives it a value: in place where it can be, so that it stays where it lies."""
        old = self.get()
        if old.shape == value.shape and old.dtype == value.dtype:
            old[...] = value
        else:
            self.put(value)

    def keep(self) -> Any:
        """Its value as it is, for `show` and `restore`. No copy."""
        return self.get()

    def show(self, kept: Any, choice: Choice) -> None:
        """Makes the chosen rows of what `keep` has given its value."""
        self.put(excerpt(kept, choice))

    def restore(self, kept: Any) -> None:
        """Makes what `keep` has given its value again."""
        self.put(kept)

    def leave_gpu(self) -> None:
        """Gives up what it has of GPUs; all ranks do it together."""
        return

    @property
    def folds_on_gpu(self) -> bool:
        """Whether `all_reduce_on_gpu` is there; else its value on a GPU has a mirror in its place."""
        return False

    def all_reduce_on_gpu(self, op: Op, weight: float | None) -> None:
        """Folds all ranks' values where they are. weight: this rank's share of a mean; None: equal ones."""
        raise AssertionError(f"{self.name} folds in host memory")

    def settle(self, here: "Here") -> tuple[int, ...]:
        """Moves the value to its place, if there is room. Returns its shape."""
        value = self.get()
        shape: tuple[int, ...] = value.shape
        if self.place is not None and value.nbytes <= self.place.n_bytes:
            mine = self.view(here, here.rank, shape)
            if value.ctypes.data != mine.ctypes.data or value.strides != mine.strides:
                mine[...] = value
                self.put(mine)
        return shape


@dataclass(frozen=True)
class Settle:
    """Step: all variables to their places. Gives the shapes, by variable.

    places: new ones, from now on; None where they stay. only: the one rank that is to do it, None for all.
    """

    numbers: tuple[int, ...]
    places: tuple[Place, ...] | None = None
    only: int | None = None
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return (number for place in self.places or () for number in place.blocks)

    def run(self, here: "Here") -> Generator[Meeting, Any, list[tuple[int, ...]]]:
        shareds = [here.shareds[number] for number in self.numbers]
        for shared, place in zip(shareds, self.places or (), strict=self.places is not None):
            shared.place = place
        if self.only is not None and here.rank != self.only:
            return []
        return [shared.settle(here) for shared in shareds]
        yield  # a step is a generator, also where it meets nobody


@dataclass(frozen=True)
class Adopt:
    """Step: what lies at these places is the variables' value from now on; it has been written there before.

    shapes: of each variable, by rank. only: the one rank that is to do it, None for all.
    """

    numbers: tuple[int, ...]
    places: tuple[Place, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    only: int | None = None
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return (number for place in self.places for number in place.blocks)

    def run(self, here: "Here") -> Generator[Meeting, Any, None]:
        for number, place, shapes in zip(self.numbers, self.places, self.shapes, strict=True):
            shared = here.shareds[number]
            shared.place = place
            if self.only is None or here.rank == self.only:
                shared.put(shared.view(here, here.rank, shapes[here.rank]))
        return
        yield  # a step is a generator, also where it meets nobody


@dataclass(frozen=True)
class Shapes:
    """Step: the shapes of the variables' values here."""

    numbers: tuple[int, ...]
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return ()

    def run(self, here: "Here") -> Generator[Meeting, Any, list[tuple[int, ...]]]:
        return [here.shareds[number].shape for number in self.numbers]
        yield  # a step is a generator, also where it meets nobody


class Known:
    """The caller's list of shared variables: their numbers by variable and by name."""

    def __init__(self, team: "Team") -> None:
        self._team = team
        self._labels: dict[
            int, tuple[int, int]
        ] = {}  # by id: of the parts, which a Shared keeps, so ids stay
        self.carried: set[int] = set()

    def label(self, part: Any) -> tuple[int, int] | None:
        """The numbers of a shared variable and of this part of it; None for any other object."""
        return self._labels.get(id(part))

    def add(self, shared: Shared) -> Shared:
        """Numbers a variable; returns what is known where it has a number already."""
        label = self.label(shared.parts[0])
        if label is not None:
            return self._team.here.shareds[label[0]]
        shared.number = len(self._team.here.shareds)
        self._team.here.shareds[shared.number] = shared
        self._labels.update({id(part): (shared.number, i) for i, part in enumerate(shared.parts)})
        return shared

    def find(self, variables: Any, what: str) -> list[Shared]:
        """The variables, or those with these names. One, or a list or tuple of several."""
        listed = variables if isinstance(variables, list | tuple) else [variables]
        found = [self._find(variable, what) for variable in listed]
        if len({shared.number for shared in found}) != len(found):
            raise ValueError(f"{what}: a variable is given twice: {', '.join(s.name for s in found)}")
        return found

    def _find(self, variable: Any, what: str) -> Shared:
        shareds = self._team.here.shareds
        if isinstance(variable, str):
            numbers = [shared.number for shared in shareds.values() if shared.name == variable]
            if len(numbers) > 1:
                raise ValueError(
                    f"{what}: {len(numbers)} variables are called {variable!r}: give the variable"
                )
        else:
            label = self.label(variable)
            if label is not None and label[1]:
                raise TypeError(
                    f"{what}: a parameter of a module is no variable of its own: use weights(module)"
                )
            numbers = [] if label is None else [label[0]]
        if not numbers:
            raise ValueError(f"{what}: no function uses a shared variable {variable!r}")
        if numbers[0] not in self.carried:
            raise RuntimeError(f"{what}: {variable!r} is not on the ranks yet: call distribute() first")
        if not shareds[numbers[0]].is_array:
            raise TypeError(f"{what}: {variable!r} is no array, and collectives are for arrays")
        return shareds[numbers[0]]


def make_places(team: "Team", sizes: Sequence[int], what: str) -> list[Place]:
    """Room for values of so many bytes each, in one new block for each rank."""
    offsets = [sum(align(size) for size in sizes[:i]) for i in range(len(sizes))]
    total = max(1, sum(align(size) for size in sizes))
    blocks = tuple(team.allocate(total, what) for _ in range(team.size))
    alone = len(sizes) == 1
    return [Place(blocks, offset, size, alone) for offset, size in zip(offsets, sizes, strict=True)]


def make_room(team: "Team", shareds: Sequence[Shared], sizes: Sequence[int]) -> tuple[Place, ...]:
    """Places with so many bytes: those that the variables have where they do, else new ones."""
    return tuple(
        shared.place
        if shared.place is not None and shared.place.n_bytes >= size
        else make_places(team, [size], f"shared variable {shared.name!r}")[0]
        for shared, size in zip(shareds, sizes, strict=True)
    )


def release_left(team: "Team", shareds: Sequence[Shared], left: Sequence[Place | None]) -> None:
    """Gives up the places that variables have left, where nothing else is in their blocks."""
    for shared, place in zip(shareds, left, strict=True):
        if place is not None and place is not shared.place and place.alone:
            team.release(*place.blocks)
