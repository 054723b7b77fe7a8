"""Programs: operations that were recorded once, kept as a graph, and run again on new inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import picture, placement, private
from lockstep.flow.arrays import Array, Storage, array
from lockstep.flow.instructions import Cell, Instruction
from lockstep.flow.lanes import Operation
from lockstep.flow.recipes import Layout


@dataclass
class ProgramVariable:
    """A value in static single assignment form: every write makes a new version.

    generated_by: the number of the operation that makes it; None where it is there before the program runs.
    waiting: the numbers of the operations that read it.
    """

    name: str
    device: str
    version: int
    generated_by: int | None
    waiting: list[int] = field(default_factory=list)


@dataclass
class ProgramOperation:
    """One operation, where it runs, and what it reads and writes: numbers in `Program.variables`."""

    number: int
    name: str
    device: str
    lane: str
    phase: str
    line: str
    inputs: list[int]
    outputs: list[int] = field(default_factory=list)


@dataclass
class Memory:
    """What operations of a program use. storage: of what is there before; None: made in it.

    last: the number of the operation that uses it last; then its value is dropped.
    """

    layout: Layout | None
    storage: Storage | None
    newest: int
    last: int = -1


@dataclass
class Step:
    """How to run an operation. reads, made: numbers of memories. needs, follows: numbers of earlier steps.

    external: memories that are there before. Others may use them too, so their hazards are looked at in every
    run.
    """

    instruction: Instruction
    reads: list[int]
    made: list[int]
    needs: list[int]
    follows: list[int]
    external_reads: list[int]
    external_writes: list[int]
    drops: list[int] = field(default_factory=list)


class Program:
    """A step that `flow.capture` has recorded. Calling it runs it on other inputs of the same shapes.

    operations, variables: what it consists of. edges: {(before, after)} between numbers of operations. Arrays
    that were there before are its state: they keep their memory and are changed in place.
    """

    def __init__(
        self,
        graph: tuple[list[ProgramOperation], list[ProgramVariable], set[tuple[int, int]]],
        steps: list[Step],
        memories: list[Memory],
        inputs: list[tuple[int, Layout, Any]],
        outputs: tuple[list[Any], Any],
    ) -> None:
        self.operations, self.variables, self.edges = graph
        self.n_runs = 0
        self._steps, self._memories, self._inputs, self._outputs = steps, memories, inputs, outputs

    def __call__(self, *inputs: torch.Tensor, order: Sequence[int] | None = None) -> Any:
        """What the function returned, as ordinary tensors, for these inputs.

        It returns when these are there; updates of the state may still run. order: numbers of all operations,
        run one after another in this order, each on its device. Raises UserError for inputs of another shape
        and for an order that breaks an edge; OperationError where an output could not be made.
        """
        self._check_inputs(inputs)
        if order is not None:
            self._check_order(order)
        operations = self._submit(inputs, order)
        leaves, structure = self._outputs
        found = [operations[leaf.operation].wait() if isinstance(leaf, Fetched) else leaf for leaf in leaves]
        return private.tree_unflatten(found, structure)

    def to_dot(self) -> str:
        """For Graphviz:

        operations as boxes, variables with device and version as ellipses, other waits dashed.
        """
        return picture.program_dot(self.operations, self.variables, self.edges)

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self._inputs):
            raise UserError(f"the program takes {len(self._inputs)} inputs, not {len(inputs)}")
        for number, (given, (_, layout, _)) in enumerate(zip(inputs, self._inputs, strict=True)):
            if not isinstance(given, torch.Tensor):
                raise UserError(f"input {number} of the program is a tensor, not {type(given).__name__}")
            if given.size() != layout[0] or given.dtype is not layout[2]:
                raise UserError(
                    f"input {number} of the program was captured as {tuple(layout[0])} {layout[2]} and is "
                    f"{tuple(given.size())} {given.dtype} now: capture the step for this shape, too"
                )

    def _check_order(self, order: Sequence[int]) -> None:
        if sorted(order) != list(range(len(self.operations))):
            raise UserError(f"order: give each of the numbers 0 to {len(self.operations) - 1} once")
        place = {number: at for at, number in enumerate(order)}
        for before, after in sorted(self.edges):
            if place[before] > place[after]:
                names = (f"{number} ({self.operations[number].name})" for number in (after, before))
                raise UserError(
                    "order: operation {} can't come before {}, on which it depends".format(*names)
                )

    def _values(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The cell of each memory in this run, and the Storage where others may use it, too."""
        outside: list[Storage | None] = [memory.storage for memory in self._memories]
        for given, (number, layout, device) in zip(inputs, self._inputs, strict=True):
            with placement.on(device):
                outside[number] = array(
                    given if given.stride() == layout[1] else _strided(given, layout)
                ).memory
        cells = [
            Cell(m.layout) if s is None else s.cell for m, s in zip(self._memories, outside, strict=True)
        ]
        return cells, outside

    def _submit(self, inputs: Sequence[Any], order: Sequence[int] | None) -> list[Operation]:
        run, self.n_runs = self.n_runs, self.n_runs + 1
        cells, outside = self._values(inputs)
        operations: dict[int, Operation] = {}
        behind: list[Operation] = []
        for number in range(len(self._steps)) if order is None else order:
            step = self._steps[number]
            instruction = step.instruction
            engine = placement.engine_of(instruction.device)
            operation = engine.operation(
                partial(
                    instruction.execute, [cells[n] for n in step.reads], [cells[n] for n in step.made], run
                ),
                engine.lane(instruction.device, instruction.lane),
                instruction.name,
            )
            operation.line, operation.phase = instruction.line, instruction.phase
            written: Any = [outside[n] for n in step.external_writes]
            for storage in written:
                storage.version += 1
            reads: Any = [outside[n] for n in step.external_reads]
            needs = [operations[n] for n in step.needs]
            follows = [operations[n] for n in step.follows]
            engine.submit(operation, reads, written, needs, follows + behind)
            operations[number] = operation
            if order is not None:
                behind = [operation]
            else:
                for n in step.drops:
                    cells[n] = None
        return [operations[number] for number in range(len(operations))]


@dataclass(frozen=True)
class Fetched:
    """Stands for an output that an operation copies into ordinary memory."""

    operation: int


def _strided(given: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy with the strides that were captured; views of it were built on them."""
    if isinstance(given, Array):
        given = given.tensor()
    with private.without_modes():
        return torch.empty_strided(layout[0], layout[1], dtype=layout[2]).copy_(given)
