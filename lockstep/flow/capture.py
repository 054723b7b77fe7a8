"""Captures a function as a program: runs it once on arrays without values, and keeps what it does."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from lockstep.errors import UserError
from lockstep.flow import placement, private, recording
from lockstep.flow.arrays import Array, Storage, fetching
from lockstep.flow.hazards import Uses, order
from lockstep.flow.instructions import Instruction
from lockstep.flow.program import Fetched, Memory, Program, ProgramOperation, ProgramVariable, Step


class CaptureError(UserError):
    """What was to be captured can't be replayed; the message has the user's line."""


def capture(function: Callable[..., Any], *examples: torch.Tensor) -> Program:
    """Records function(*examples) without running it. The program takes inputs of the examples' shapes.

    Inputs are put where an example is, or on the current device if it is no array. Arrays that were there
    before are its state. Raises CaptureError with the user's line for what depends on values, for an ordinary
    tensor that it writes, and for arrays that it makes and something else keeps.
    """
    made = Capture()
    inputs = [made.input(number, example) for number, example in enumerate(examples)]
    with recording.capturing(made):
        returned = function(*inputs)
    leaves, structure = private.tree_flatten(returned)
    outputs = [made.output(leaf) for leaf in leaves]
    del inputs, returned, leaves
    made.close()
    return Program(
        (made.operations, made.variables, made.edges),
        made.steps,
        made.memories,
        made.inputs,
        (outputs, structure),
    )


class _Number:
    """An operation as hazards see it: its number. While a program is captured, none has run."""

    settled = False

    def __init__(self, number: int) -> None:
        self.number = number


class Capture:
    """What has been recorded so far."""

    def __init__(self) -> None:
        self.operations: list[ProgramOperation] = []
        self.variables: list[ProgramVariable] = []
        self.edges: set[tuple[int, int]] = set()
        self.steps: list[Step] = []
        self.memories: list[Memory] = []
        self.inputs: list[tuple[int, Any, Any]] = []  # memory, layout, device
        self._open = True
        self._uses: list[Uses] = []
        self._numbers: dict[int, int] = {}  # of memories, by the id of their storage
        self._storages: list[Storage] = []  # keeps those ids
        self._copies: dict[int, dict[Any, Any]] = {}
        self._leaves: dict[int, Array] = {}

    def refuse(self, what: str, remedy: str = "a program has values only when it runs") -> NoReturn:
        """Raises CaptureError with the user's line."""
        line = placement.user_line()
        if self._open:
            raise CaptureError(f"{line}: {what}, which can't be captured: {remedy}")
        raise UserError(f"{line}: {what}: this array stands for a value inside a captured program")

    def see(self, inputs: Sequence[Array]) -> None:
        """Parameters, whose gradients will be arrays of the program when it is captured."""
        for array in inputs:
            if array.requires_grad and array.is_leaf:
                self._leaves[id(array)] = array

    def copies_of(self, storage: Storage) -> tuple[dict[Any, Any], int]:
        """Copies that the program makes of it in other devices' memories, and its version in the program."""
        number = self._number(storage)
        return self._copies.setdefault(number, {}), self.variables[self.memories[number].newest].version

    def input(self, number: int, example: Any) -> Array:
        if not isinstance(example, torch.Tensor):
            raise UserError(f"flow.capture: example {number} is a tensor, not {type(example).__name__}")
        layout = (example.size(), example.stride(), example.dtype)
        place = example.place if isinstance(example, Array) else placement.current_device()
        storage = Storage(place, layout, f"input {number}", self)
        self.inputs.append((self._number(storage), layout, storage.device))
        return Array(storage, layout[0], layout[1], 0, layout[2])

    def output(self, leaf: Any) -> Any:
        """An array that was returned is copied into ordinary memory at the end of each run."""
        if not isinstance(leaf, Array):
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        self.add(fetching(leaf), [leaf.memory], [], [])
        return Fetched(len(self.steps) - 1)

    def add(
        self, step: Instruction, reads: Sequence[Storage], writes: Sequence[Storage], made: Sequence[Storage]
    ) -> "_Unread":
        """The next operation."""
        if not self._open:
            self.refuse(step.name)
        operation = _Number(len(self.steps))
        read = [self._number(storage) for storage in reads]
        used = [n for at, n in enumerate(read) if at != step.overwrites]
        written = list(dict.fromkeys(self._number(storage) for storage in writes))
        shown = ProgramOperation(
            operation.number, step.name, step.device.name, step.device.lane_for(step.lane), step.phase,
            step.line, [self.memories[n].newest for n in dict.fromkeys(used)],
        )  # fmt: skip
        new = [self._number(storage, f"{step.name} {operation.number}") for storage in made]
        needs, follows = order(
            operation, [self._uses[n] for n in used], [self._uses[n] for n in (*written, *new)]
        )
        self._show(shown, written, new)
        before = {each.number for each in (*needs, *follows)} - {operation.number}
        self.edges |= {(number, operation.number) for number in before}
        needed = {each.number for each in needs}
        external = [n for n in used if self._is_there(n)]
        touched = [n for n in written if self._is_there(n)]
        kept = Step(step, read, new, sorted(needed), sorted(before - needed), external, touched)
        self.steps.append(kept)
        return _Unread(self, step.name)

    def _is_there(self, number: int) -> bool:
        return self.memories[number].storage is not None or any(number == n for n, _, _ in self.inputs)

    def _show(self, shown: ProgramOperation, written: list[int], new: list[int]) -> None:
        """The operation and the versions that it makes."""
        for variable in shown.inputs:
            self.variables[variable].waiting.append(shown.number)
        for n in written:
            old = self.variables[self.memories[n].newest]
            self.memories[n].newest = len(self.variables)
            self.variables.append(ProgramVariable(old.name, old.device, old.version + 1, shown.number))
        for n in new:
            self.variables[self.memories[n].newest].generated_by = shown.number
        shown.outputs = [self.memories[n].newest for n in (*written, *new)]
        self.operations.append(shown)

    def _number(self, storage: Storage, name: str = "") -> int:
        """That of a memory, which may be new here."""
        known = self._numbers.get(id(storage))
        if known is not None:
            return known
        number = self._numbers[id(storage)] = len(self.memories)
        ours = storage.program is self
        self._storages.append(storage)
        self._uses.append(Uses())
        self.memories.append(Memory(storage.cell.layout, None if ours else storage, len(self.variables)))
        title = storage.name or name or f"array {number}"
        self.variables.append(ProgramVariable(title, storage.device.name, 0, None))
        return number

    def close(self) -> None:
        """Nothing of what it made may be kept:

        it would be made in every run, and whoever keeps it not see it.
        """
        self._open = False
        self._copies.clear()
        while self._leaves:  # a loop's variable would keep the last
            _forget_gradient(self._leaves.popitem()[1], self)
        inputs = {n for n, _, _ in self.inputs}
        made = [
            (n, weakref.ref(s)) for n, s in enumerate(self._storages) if s.program is self and n not in inputs
        ]
        self._storages.clear()
        if any(storage() is not None for _, storage in made):
            gc.collect()
        for n, storage in made:
            if storage() is not None:
                self._refuse_keeping(n)

    def _refuse_keeping(self, memory: int) -> NoReturn:
        name = self.variables[self.memories[memory].newest].name
        maker = next(step for step, kept in enumerate(self.steps) if memory in kept.made)
        raise CaptureError(
            f"{self.operations[maker].line}: {name} is kept by something outside of the step, which would "
            "not see the next run's: run the step once before the capture, so that what it keeps is there"
        )


def _forget_gradient(leaf: Array, program: Capture) -> None:
    if isinstance(leaf.grad, Array) and leaf.grad.memory.program is program:
        leaf.grad = None


class _Unread:
    """Stands for the result of an operation while a program is captured."""

    def __init__(self, capture: Capture, name: str) -> None:
        self._capture, self._name = capture, name

    def wait(self) -> NoReturn:
        self._capture.refuse(f"waiting for {self._name}")

    result = wait
