"""Capture of a function as a program: it runs once on arrays without values, and its operations recorded."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from lockstep.errors import UserError
from lockstep.flow import placement, private
from lockstep.flow.arrays import Array
from lockstep.flow.creation import recording_everything
from lockstep.flow.graph import Uses, order
from lockstep.flow.instructions import Instruction, Storage, fetching, strides_of_copy
from lockstep.flow.program import (
    CapturedProgram,
    FetchedOutput,
    ProgramMemory,
    ProgramOperation,
    ProgramStep,
    ProgramVariable,
)


class CaptureError(UserError):
    """The function cannot be replayed; the message has the user's line."""


def capture(function: Callable[..., Any], *examples: torch.Tensor) -> CapturedProgram:
    """Record function(*examples) without computing it, and return a program for inputs of these shapes.

    An input lies where its example lies, or on the current device if the example is no array. Arrays that
    exist before the capture are the program's state.

    Raises:
        CaptureError: The function depends on values, writes an ordinary tensor, or makes an array that
            something else keeps. The message has the user's line.
    """
    if not callable(function):
        raise UserError(f"flow.capture: {function!r} is not a function")
    made = Capture()
    try:
        inputs = [made.input(number, example) for number, example in enumerate(examples)]
        with placement.capturing(made):
            with recording_everything():
                returned = function(*inputs)
            leaves, structure = private.tree_flatten(returned)
            outputs = [made.output(leaf) for leaf in leaves]
        del inputs, returned, leaves
        changed = made.take_changed()
        made.close()
    except BaseException:
        made.take_changed()  # they would be kept as long as an array that the program has made
        made.forget_gradients()  # the next backward would add to gradients that have no value
        made.restore_places()
        raise
    return CapturedProgram(
        (made.operations, made.variables, made.edges),
        made.steps,
        made.memories,
        made.inputs,
        (outputs, structure),
        changed,
    )


class _Number:
    """An operation as the hazards see it: its number. During a capture no operation has run."""

    settled = False

    def __init__(self, number: int) -> None:
        self.number = number


class Capture:
    """The operations and memories that have been recorded so far.

    Attributes:
        is_open: Whether operations can be added; `placement.capturing` ends it.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.operations: list[ProgramOperation] = []
        self.variables: list[ProgramVariable] = []
        self.edges: set[tuple[int, int]] = set()
        self.steps: list[ProgramStep] = []
        self.memories: list[ProgramMemory] = []
        self.inputs: list[tuple[int, Any, Any]] = []  # memory, layout, device
        self._uses: list[Uses] = []
        self._numbers: dict[int, int] = {}  # of memories, by the id of their storage
        self._storages: list[Storage] = []  # keeps those ids
        self._copies: dict[int, dict[Any, Any]] = {}
        self._leaves: dict[int, weakref.ref[Array]] = {}  # by id; a dead one may be replaced
        self._changed: dict[int, Array] = {}  # by id: arrays from before the capture that it writes
        # By id: arrays from before the capture that it gives other memory or another shape, as they were, and
        # the line that does it
        self._places: dict[int, tuple[weakref.ref[Array], Array, str]] = {}

    def refuse(self, what: str, remedy: str = "a program has values only when it runs") -> NoReturn:
        """Raise CaptureError with the user's line."""
        line = placement.user_line()
        if self.is_open:
            raise CaptureError(f"{line}: {what}, which can't be captured: {remedy}")
        raise UserError(
            f"{line}: {what}: this array stands for a value inside a captured program: make it, or the "
            "optimizer that keeps it, anew"
        )

    def see(self, inputs: Sequence[Array], written: Sequence[Array]) -> None:
        """Note parameters, whose gradients the program will make, and arrays that each run changes.

        Args:
            inputs: Of an operation.
            written: Those of them whose writes autograd counts.
        """
        for array in inputs:
            leaf: Any = array if array._base is None else array._base
            if leaf.requires_grad and leaf.is_leaf:
                self._leaves[id(leaf)] = weakref.ref(leaf)
        for array in written:
            if array.memory.program is None:
                whole: Any = array if array._base is None else array._base
                self._changed[id(whole)] = whole

    def take_changed(self) -> list[Array]:
        """Return arrays that share autograd's version counters with those that each run changes, once.

        They have no history, so they keep nothing but the memory, which the program keeps anyway.
        """
        changed, self._changed = self._changed, {}
        return [array.detach() for array in changed.values()]  # type: ignore[misc]

    def written(self) -> set[int]:
        """Return the ids of the memories from before the capture that it writes, also those of `x.data`."""
        return {id(self._storages[n]) for step in self.steps for n in step.external_writes}

    def note_place(self, array: Array) -> None:
        """Note where an array from before the capture lies, because the step changes that."""
        known = self._places.get(id(array))
        if array.memory.program is None and (known is None or known[0]() is not array):
            self._places[id(array)] = weakref.ref(array), array.data, placement.user_line()

    def moves(self, array: Array) -> bool:
        """Return whether the step has given an array from before the capture a place, such as its own."""
        return id(array) in self._places

    def restore_places(self) -> list[tuple[weakref.ref[Array], str]]:
        """Give arrays that the step has moved their memories and shapes again; return them with the lines."""
        moved = []
        for reference, old, line in self._places.values():
            array = reference()
            if array is not None and _place_of(array) != _place_of(old):
                array.data = old
                moved.append((reference, line))
        self._places.clear()
        return moved

    def copies_of(self, storage: Storage) -> tuple[dict[Any, Any], int]:
        """Return a memory's copies on other devices, and its version in the program."""
        number = self._number(storage)
        return self._copies.setdefault(number, {}), self.variables[self.memories[number].newest].version

    def input(self, number: int, example: Any) -> Array:
        """Return an array that stands for an input."""
        if not isinstance(example, torch.Tensor):
            raise UserError(f"flow.capture: example {number} is a tensor, not {type(example).__name__}")
        if example.layout is not torch.strided:
            raise UserError(f"flow.capture: example {number} is sparse: give it as dense tensors (to_dense)")
        layout = (example.size(), strides_of_copy(example), example.dtype)  # each run reads a copy
        place = example.place if isinstance(example, Array) else placement.current_device()
        storage = Storage(place, layout, f"input {number}", self)
        self.inputs.append((self._number(storage), layout, storage.device))
        made = Array(storage, layout[0], layout[1], 0, layout[2])
        # Not for another stage's result: torch refuses writes into a leaf, such as by nn.ReLU(inplace=True)
        return made.requires_grad_(example.requires_grad and example.is_leaf)  # type: ignore[return-value]

    def output(self, leaf: Any) -> Any:
        """Return what a run returns in place of this leaf: an array is copied to host memory."""
        if not isinstance(leaf, Array):
            with private.without_modes():
                return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        self.add(fetching(leaf.memory, leaf.view_of_memory()), [leaf.memory], [], [])
        return FetchedOutput(len(self.steps) - 1)

    def add(
        self, step: Instruction, reads: Sequence[Storage], writes: Sequence[Storage], made: Sequence[Storage]
    ) -> "_Unread":
        """Append an operation."""
        if not self.is_open:
            self.refuse(step.name)
        operation = _Number(len(self.steps))
        read = [self._number(storage) for storage in reads]
        used = [n for at, n in enumerate(read) if at != step.overwrites]
        written = list(dict.fromkeys(self._number(storage) for storage in writes))
        described = ProgramOperation(
            operation.number, step.name, step.device.name, step.device.lane_for(step.lane), step.phase,
            step.line, [self.memories[n].newest for n in dict.fromkeys(used)],
        )  # fmt: skip
        new = [self._number(storage, f"{step.name} {operation.number}") for storage in made]
        needs, follows = order(
            operation, [self._uses[n] for n in used], [self._uses[n] for n in (*written, *new)]
        )
        self._describe(described, written, new)
        before = {each.number for each in (*needs, *follows)} - {operation.number}
        self.edges |= {(number, operation.number) for number in before}
        needed = {each.number for each in needs}
        external = [n for n in used if self._exists_before(n)]
        touched = [n for n in written if self._exists_before(n)]
        follows_only = sorted(before - needed)
        self.steps.append(ProgramStep(step, read, new, sorted(needed), follows_only, external, touched))
        return _Unread(self, step.name)

    def _exists_before(self, number: int) -> bool:
        """Return whether a memory exists before the program runs."""
        return self.memories[number].storage is not None or any(number == n for n, _, _ in self.inputs)

    def _describe(self, described: ProgramOperation, written: list[int], new: list[int]) -> None:
        """Append the public description of an operation, and the versions that it makes."""
        for variable in described.inputs:
            self.variables[variable].waiting.append(described.number)
        for n in written:
            old = self.variables[self.memories[n].newest]
            self.memories[n].newest = len(self.variables)
            self.variables.append(ProgramVariable(old.name, old.device, old.version + 1, described.number))
        for n in new:
            self.variables[self.memories[n].newest].generated_by = described.number
        described.outputs = [self.memories[n].newest for n in (*written, *new)]
        self.operations.append(described)

    def _number(self, storage: Storage, name: str = "") -> int:
        """Return the number of a memory, which may be new."""
        known = self._numbers.get(id(storage))
        if known is not None:
            return known
        number = self._numbers[id(storage)] = len(self.memories)
        ours = storage.program is self
        self._storages.append(storage)
        self._uses.append(Uses())
        self.memories.append(
            ProgramMemory(storage.cell.layout, None if ours else storage, len(self.variables))
        )
        title = storage.name or name or f"array {number}"
        self.variables.append(ProgramVariable(title, storage.device.name, 0, None))
        return number

    def forget_gradients(self) -> None:
        """Remove the gradients that the program makes from its parameters."""
        for leaf in self._leaves_with_gradients():
            leaf.grad = None

    def _forget_used_gradients(self) -> None:
        """Remove the gradients with which the step updates their parameters; only it needs them."""
        for leaf in self._leaves_with_gradients():
            update = self._uses[self._number(leaf.memory)].writer
            if update is not None and update.number > self._maker(self._number(leaf.grad.memory)):
                leaf.grad = None

    def _leaves_with_gradients(self) -> list[Any]:
        leaves = (leaf() for leaf in self._leaves.values())
        return [
            leaf for leaf in leaves
            if leaf is not None and isinstance(leaf.grad, Array) and leaf.grad.memory.program is self
        ]  # fmt: skip

    def _maker(self, memory: int) -> int:
        """Return the number of the operation that makes a memory; -1 for an input."""
        return next((number for number, step in enumerate(self.steps) if memory in step.made), -1)

    def close(self) -> None:
        """Check that a closed capture can be replayed.

        Raises:
            CaptureError: Something keeps an array that the program makes: it would not see the next run's.
        """
        self._refuse_moving()
        self._copies.clear()
        self._forget_used_gradients()
        inputs = {n for n, _, _ in self.inputs}
        made = [
            (n, weakref.ref(s)) for n, s in enumerate(self._storages) if s.program is self and n not in inputs
        ]
        self._storages.clear()
        if any(storage() is not None for _, storage in made):
            gc.collect()
        for n, storage in made:
            if storage() is not None:
                self._refuse_keeping(n, storage())

    def _refuse_moving(self) -> None:
        moved = self.restore_places()
        if moved:
            gc.collect()
        for reference, line in moved:
            array = reference()
            if array is not None:
                raise CaptureError(
                    f"{line}: the step gives an array of shape {tuple(array.shape)} that exists before it "
                    "other memory or another shape (x.data = y, x.t_()), which a run would not do: change "
                    "its value in place (copy_)"
                )

    def _refuse_keeping(self, memory: int, storage: Any) -> NoReturn:
        name = self.variables[self.memories[memory].newest].name
        remedy = (
            "return it instead; or run the step once before the capture, so that it exists, and change it "
            "in place (copy_). ParallelExecutor takes a module that returns it, or keeps it in a buffer"
        )
        for leaf in self._leaves_with_gradients():
            if leaf.grad.memory is storage:
                name = f"{name}, the gradient of {leaf.memory.name or 'a parameter'},"
                remedy = (
                    "put optimizer.step into the step; or end it with zero_grad, if nothing needs it later; "
                    "or make gradients before the capture and zero them in place (set_to_none=False)"
                )
        raise CaptureError(
            f"{self.operations[self._maker(memory)].line}: {name} is kept by something outside of the step, "
            f"which would not see the next run's: {remedy}"
        )


def _place_of(array: Array) -> Any:
    return array.memory, array.size(), array.stride(), array.storage_offset(), array.dtype


class _Unread:
    """A stand-in for an operation's result during a capture."""

    def __init__(self, capture: Capture, name: str) -> None:
        self._capture, self._name = capture, name

    def wait(self) -> NoReturn:
        """Refuse: a program that is being captured has no values."""
        self._capture.refuse(f"waiting for {self._name}")

    result = wait
