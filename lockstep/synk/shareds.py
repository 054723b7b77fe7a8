"""Shared variables on all ranks, by number, and their slots in shared blocks.

A variable that collectives can use has a *slot*: an offset in a block of each rank, which all ranks map. Its
value lies in the slot while updates are in place. An update that creates a new array leaves the slot, and the
next collective copies the value back (`move_to_slot`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.exchange import Op
from lockstep.synk.blocks import ArrayLocation, BlockTable
from lockstep.synk.rows import Choice, excerpt


@dataclass(frozen=True)
class BlockSlot:
    """A range of n_bytes at one offset in a block of every rank; no other slot uses `exclusive` blocks."""

    blocks: tuple[int, ...]  # by rank
    offset: int
    n_bytes: int
    exclusive: bool

    def location(self, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArrayLocation:
        """Return the place of an array at the slot's beginning, in a rank's block."""
        return ArrayLocation(self.blocks[rank], dtype.str, shape, self.offset)


class Shared(ABC):
    """A shared variable in this process; subclasses implement graph variables and tensors."""

    kind: str  # kind of the programs that can use it
    number: int
    name: str
    slot: BlockSlot | None = None
    rows: int = 1  # number of rows of the call that last updated it in this process

    parts: list[Any]  # the user's objects: the variable itself, or the parameters in the vector

    @abstractmethod
    def get(self) -> Any:
        """Return the value, not a copy; a NumPy array if `is_array`."""

    @abstractmethod
    def put(self, value: Any) -> None:
        """Make an array the value. No copy."""

    def use_rank_stream(self, rank: int) -> None:
        """Replace a random stream by this rank's own; other variables are unchanged."""
        return

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value, which must be an array."""
        result: np.dtype[Any] = self.get().dtype
        return result

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value, which must be an array."""
        result: tuple[int, ...] = self.get().shape
        return result

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_array(self) -> bool:
        """True if the value can lie in a block."""
        value = self.get()
        return isinstance(value, np.ndarray) and not value.dtype.hasobject

    def view(self, blocks: BlockTable, rank: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array in the slot of a rank."""
        assert self.slot is not None, f"{self.name} has no slot"
        return blocks.array(self.slot.location(rank, self.dtype, shape))

    def assign(self, value: np.ndarray) -> None:
        """Set the value, in place if shape and dtype allow, so that it stays in its slot."""
        old = self.get()
        if old.shape == value.shape and old.dtype == value.dtype:
            old[...] = value
        else:
            self.put(value)

    def sync_objects(self) -> Sequence[Callable[[], None]]:
        """Return functions that take over copies of the values of replaced objects, for `sync_objects`.

        Raises:
            ValueError: The user's objects no longer fit.
        """
        return ()

    def add_owners(self, modules: Iterable[Any]) -> None:
        """Add the modules that have the variable's parts as buffers, which `forward` may replace."""
        return

    def attributes(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the parts that have attributes of the user's, with these by name."""
        return []

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the variable can't take a value of this shape."""
        return

    def parts_without_value(self) -> frozenset[int]:
        """Return the indices of the parts without a value: parameters whose gradient is None."""
        return frozenset()

    def set_parts_without_value(self, indices: frozenset[int]) -> None:
        """Remove the values of the parts with these indices, and give all other parts theirs."""
        return

    def save(self) -> Any:
        """Return the current value for `select_rows` and `restore`. No copy."""
        return self.get()

    def select_rows(self, saved: Any, choice: Choice) -> None:
        """Make the chosen rows of a saved value the value."""
        self.put(excerpt(saved, choice))

    def restore(self, saved: Any) -> None:
        """Make a saved value the value again."""
        self.put(saved)

    def leave_gpu(self) -> None:
        """Move the user's tensors to host memory. No rank waits for another."""
        return

    def release_gpu(self) -> None:
        """Free memory on GPUs. All ranks call it together."""
        return

    @property
    def reduces_on_device(self) -> bool:
        """True if `all_reduce_on_device` is supported; else a GPU value is copied to its slot and back."""
        return False

    def prepare_all_reduce(self) -> None:
        """Collect the value for `all_reduce_on_device`; raise ValueError if the user's objects no longer fit.

        A rank must raise it before the ranks reduce: the others would wait for it until the timeout.
        """
        return

    def all_reduce_on_device(self, op: Op, weight: float | None) -> None:
        """Reduce all ranks' values on their GPUs, after `prepare_all_reduce` on all of them.

        Args:
            weight: This rank's weight in a mean; None for equal weights and for other ops.
        """
        raise AssertionError(f"{self.name} is reduced in host memory")

    def move_to_slot(self, blocks: BlockTable, rank: int) -> tuple[int, ...]:
        """Copy the value to the slot of this process's rank if it fits, and return its shape."""
        value = self.get()
        shape: tuple[int, ...] = value.shape
        if self.slot is not None and value.nbytes <= self.slot.n_bytes:
            mine = self.view(blocks, rank, shape)
            if value.ctypes.data != mine.ctypes.data or value.strides != mine.strides:
                mine[...] = value
                self.put(mine)
        return shape


def sync_objects(shareds: Iterable[Shared]) -> None:
    """Take over the values of replaced objects; raise ValueError if the user's objects no longer fit.

    All values are copied before one is written, because two variables may have exchanged their memory.
    """
    for take_over in [each for shared in shareds for each in shared.sync_objects()]:
        take_over()


class SharedRegistry:
    """The caller's registry of shared variables, by number, object and name.

    Args:
        shareds: The variables by number, to which `add` adds.
        numbers: Supplies numbers of new variables.

    Attributes:
        delivered: Numbers of the variables that are on all ranks.
    """

    def __init__(self, shareds: dict[int, Shared], numbers: Iterator[int]) -> None:
        self._shareds, self._numbers = shareds, numbers
        self._labels: dict[int, tuple[int, int]] = {}  # by the part's id, which its Shared keeps in use
        self.delivered: set[int] = set()

    def label(self, part: Any) -> tuple[int, int] | None:
        """Return the numbers of a shared variable and of this part of it; None for any other object."""
        return self._labels.get(id(part))

    def name_of(self, part: Any) -> str | None:
        """Return the name of the variable to which an object belongs; None if it is not shared."""
        label = self.label(part)
        return None if label is None else self._shareds[label[0]].name

    def add(self, shared: Shared) -> Shared:
        """Register a variable; return the registered one if it already exists."""
        label = self.label(shared.parts[0])
        if label is not None:
            return self._shareds[label[0]]
        shared.number = next(self._numbers)
        self._shareds[shared.number] = shared
        self._labels.update({id(part): (shared.number, i) for i, part in enumerate(shared.parts)})
        return shared

    def sync_objects(self) -> None:
        """Call `sync_objects` for all variables."""
        sync_objects(self._shareds.values())

    def find(self, variables: Any, what: str) -> list[Shared]:
        """Return the variables for one variable or name, or a list or tuple of them."""
        listed = variables if isinstance(variables, list | tuple) else [variables]
        result = [self._find(variable, what) for variable in listed]
        self.sync_objects()
        if len({shared.number for shared in result}) != len(result):
            raise ValueError(f"{what}: a variable is given twice: {', '.join(s.name for s in result)}")
        return result

    def _find(self, variable: Any, what: str) -> Shared:
        shareds = self._shareds
        if isinstance(variable, str):
            numbers = [shared.number for shared in shareds.values() if shared.name == variable]
            if len(numbers) > 1:
                raise ValueError(
                    f"{what}: {len(numbers)} variables are called {variable!r}: give the variable"
                )
        else:
            label = self.label(variable)
            if label is not None and label[1]:
                name = shareds[label[0]].name
                raise TypeError(
                    f"{what}: a tensor of a module is not a separate variable: use weights(module) or "
                    f"buffers(module), or the name of the variable to which it belongs, {name!r}"
                )
            numbers = [] if label is None else [label[0]]
        if not numbers:
            raise ValueError(f"{what}: no function uses a shared variable {variable!r}")
        if numbers[0] not in self.delivered:
            raise RuntimeError(
                f"{what}: {variable!r} is not on the ranks yet: call distribute() first, which sends "
                "variables along with new functions"
            )
        if not shareds[numbers[0]].is_array:
            raise TypeError(f"{what}: {variable!r} is no array, and collectives are for arrays")
        return shareds[numbers[0]]


def receive_attributes(context: Any, objects: Iterator[Any]) -> None:
    """Give the parts of shared variables on a worker their attributes (`p.weight_decay = 0.0`)."""
    for part, attributes in next(objects):
        vars(part).update(attributes)
