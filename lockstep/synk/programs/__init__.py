"""What a function runs on a rank: a graph of PyTensor (graph.py), or a callable with torch (callables.py)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.synk import rows
from lockstep.synk.folded import Folded
from lockstep.synk.shareds import Shared


@dataclass(frozen=True)
class Input:
    """An input of a function. dtype and ndim: None where any will do. whole: not divided among the ranks."""

    name: str | None
    dtype: str | None
    ndim: int | None
    whole: bool


@dataclass(frozen=True)
class Asked:
    """What the user gave to lockstep.synk.function, unchecked. name: theirs, or one made for it."""

    name: str
    inputs: Any
    outputs: Any
    bcast_inputs: Any
    updates: Any
    givens: Any
    sliceable_shareds: Any
    options: dict[str, Any]


class Program(ABC):
    """A function in this process.

    output_modes: by output, as normalised; update_modes: by variable number, of those that calls in slices
    fold. sliceable: the stored variables whose rows are chosen by batch_s, in order.
    """

    kind: str  # 'graph' or 'callable', as of the shared variables that it can use
    name: str
    inputs: Sequence[Input]
    output_modes: Sequence[str | None]
    returns: str  # 'list', 'one' or 'none'
    updated: dict[Shared, str | None]
    default_modes: set[Shared]  # those of `updated` whose mode the user has not given
    sliceable: Sequence[Shared]

    def excerpt(self, arrays: Sequence[np.ndarray], choices: Sequence[rows.Choice | None]) -> list[Any]:
        """The chosen rows of its inputs, as `call` takes them; None chooses a whole array."""
        pairs = zip(arrays, choices, strict=True)
        return [array if choice is None else rows.excerpt(array, choice) for array, choice in pairs]

    @abstractmethod
    def call(self, inputs: list[Any]) -> list[Any]:
        """Computes all outputs, and updates variables of this process."""

    def call_whole(self, inputs: list[Any]) -> list[Any]:
        """The same for a call in one part, of which large outputs may stay on a device, `Kept`."""
        return self.call(inputs)

    def call_part(self, inputs: list[Any]) -> list[Any]:
        """The same for one part of several, whose outputs `folded` takes."""
        return self.call(inputs)

    def folded(self, number: int, n_rows: int) -> Folded:
        """What folds the parts of an output; together they stand for n_rows."""
        return Folded(self.output_modes[number], n_rows, f"{self.name}: output {number}")

    @abstractmethod
    def call_alone(self, inputs: list[Any]) -> list[Any]:
        """The same on plain values as the user gives them, with the checks of the program's kind."""

    @abstractmethod
    def pieces(self, number: int, new: list[Shared]) -> Iterator[tuple[str, Any]]:
        """What makes it on a worker, under this number (carrying.pack). new: variables to make first."""

    def marks(self) -> Any:
        """Something that changes when a variable does that no update is declared for; see `check_marks`."""
        return None

    def check_marks(self, before: Any) -> None:
        """Raises RuntimeError where a variable changed that no update is declared for."""
        assert before is None, "whoever has marks checks them"

    @property
    def divides(self) -> bool:
        """Whether a call has rows to divide."""
        return bool(self.sliceable) or any(not given.whole for given in self.inputs)
