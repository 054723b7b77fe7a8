"""The programs of functions: graphs of PyTensor (graphs.py), and callables with torch (callables.py)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.synk import rows
from lockstep.synk.results import PartReducer
from lockstep.synk.shareds import Shared


@dataclass(frozen=True)
class Input:
    """An input of a function.

    Attributes:
        dtype, ndim: Required dtype and number of dimensions; None accepts any.
        whole: Every rank receives the whole input.
        shape: Required lengths of the dimensions, each None where any length will do; None accepts any shape.
    """

    name: str | None
    dtype: str | None
    ndim: int | None
    whole: bool
    shape: tuple[int | None, ...] | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return True if each dimension has the required length. The number of dimensions must be right."""
        required = self.shape or (None,) * len(shape)
        return all(want in (None, length) for want, length in zip(required, shape, strict=True))


@dataclass(frozen=True)
class UpdateMode:
    """The mode that reduces an updated variable over the slices of a call; `by_user` if the user set it."""

    mode: str | None = "avg"
    by_user: bool = False


@dataclass(frozen=True)
class FunctionRequest:
    """The unchecked arguments of lockstep.synk.function, and the function's name."""

    name: str
    inputs: Any
    outputs: Any
    bcast_inputs: Any
    updates: Any
    givens: Any
    sliceable_shareds: Any
    options: dict[str, Any]


class RankProgram(ABC):
    """A function in this process.

    Attributes:
        output_modes: Normalised mode of each output.
        updated: Updated variables, with the mode that reduces them over the slices of a call.
        sliceable: Stored variables whose rows batch_s chooses, in order.
        source: The user's callable; None for a graph.
    """

    kind: str  # 'graph' or 'callable', like that of the shared variables that it can use
    name: str
    inputs: Sequence[Input]
    output_modes: Sequence[str | None]
    returns: str  # 'list', 'one' or 'none'
    updated: dict[Shared, str | None]
    default_modes: set[Shared]  # variables in `updated` for which the user specified no mode
    sliceable: Sequence[Shared]
    source: Any = None

    def excerpt(self, arrays: Sequence[np.ndarray], choices: Sequence[rows.Choice | None]) -> list[Any]:
        """Return the chosen rows of the inputs, for `call`; None chooses a whole array."""
        pairs = zip(arrays, choices, strict=True)
        return [array if choice is None else rows.excerpt(array, choice) for array, choice in pairs]

    @abstractmethod
    def check_dtype(self, what: str, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if an input can't have this dtype. `what` names the function and the input."""

    @abstractmethod
    def call(self, inputs: list[Any]) -> list[Any]:
        """Compute all outputs, and update the variables of this process."""

    def call_whole(self, inputs: list[Any]) -> list[Any]:
        """Compute a call in one slice, whose large outputs may stay on a GPU as DeviceOutput."""
        return self.call(inputs)

    def call_part(self, inputs: list[Any]) -> list[Any]:
        """Compute one slice of several; the reducers of `make_reducer` take its outputs."""
        return self.call(inputs)

    def make_reducer(self, number: int, n_rows: int) -> PartReducer:
        """Return a reducer of the slices of an output, which have n_rows rows in total."""
        return PartReducer(self.output_modes[number], n_rows, f"{self.name}: output {number}")

    def capture_settings(self) -> Any:
        """Return the settings of this process with which all ranks have to compute, for `use_settings`."""
        return None

    def use_settings(self, settings: Any) -> AbstractContextManager[None]:
        """Compute with the caller's settings inside of the `with` block."""
        return nullcontext()

    def find_written(self, inputs: list[Any]) -> list[int]:
        """Return the numbers of the inputs that a call wrote into."""
        return []

    @abstractmethod
    def call_locally(self, inputs: list[Any]) -> list[Any]:
        """Compute on plain values in this process only, after checking them."""

    def count_rows(self, inputs: Sequence[Any]) -> int:
        """Return the number of rows of a call on these inputs in one process; 1 if nothing is divided."""
        pairs = zip(inputs, self.inputs, strict=True)
        divided = [value for value, spec in pairs if not spec.whole and np.ndim(value)]
        divided += [shared.get() for shared in self.sliceable]
        return len(divided[0]) if divided else 1

    @abstractmethod
    def pieces(self, number: int, new: list[Shared]) -> Iterator[tuple[str, Any]]:
        """Yield the objects from which a worker builds the program (delivery.pack), new variables first."""

    def versions(self) -> Any:
        """Return versions of the variables without declared updates, for `check_unchanged`."""
        return None

    def check_unchanged(self, before: Any) -> None:
        """Raise RuntimeError if a variable without a declared update changed."""
        assert before is None, "a program with versions checks them"

    @property
    def divides(self) -> bool:
        """True if a call has rows to divide."""
        return bool(self.sliceable) or any(not argument.whole for argument in self.inputs)
