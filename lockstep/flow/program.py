"""Programs: operations that were recorded once, kept as a graph, and run again on new inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import picture, placement, private, trace
from lockstep.flow.arrays import Array, Storage, array
from lockstep.flow.chains import Node, chains
from lockstep.flow.engine import Engine
from lockstep.flow.instructions import Cell, Instruction
from lockstep.flow.lanes import GRAPH, Lane, Operation
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
    """What operations of a program use. storage: of what is there before; None: made in it."""

    layout: Layout | None
    storage: Storage | None
    newest: int


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


class Chain:
    """Neighbouring steps that are one operation for the engine (lockstep/flow/chains.py), mostly one."""

    def __init__(self, numbers: list[int], steps: Sequence[Step]) -> None:
        first, own = steps[numbers[0]], [steps[number] for number in numbers]
        self.numbers, self.place = numbers, (first.instruction.device, first.instruction.lane)
        self.needs, self.follows = first.needs, first.follows
        self.external_reads, self.external_writes = first.external_reads, first.external_writes
        self.drops: list[int] = []  # what no later one uses
        self.used = list(dict.fromkeys(n for step in own for n in (*step.reads, *step.made)))
        places = {n: place for place, n in enumerate(self.used)}
        last = {n: at for at, step in enumerate(own) for n in (*step.reads, *step.made)}
        self._steps = [
            (
                step.instruction,
                [places[n] for n in step.reads],
                [places[n] for n in step.made],
                [places[n] for n, place in last.items() if place == at],
            )
            for at, step in enumerate(own)
        ]

    def operation(self, engine: Engine, lane: Lane, cells: Sequence[Any], run: int) -> Operation:
        instruction = self._steps[0][0]
        running = _Running(self._steps, [cells[n] for n in self.used], run)
        operation = engine.operation(running, lane, instruction.name)
        operation.line, operation.phase = instruction.line, instruction.phase
        running.operation = operation
        return operation


class _Running:
    """A chain in one run of the program. cells: of what it uses."""

    __slots__ = ("cells", "operation", "run", "steps")

    def __init__(self, steps: Sequence[Any], cells: list[Any], run: int) -> None:
        self.steps, self.cells, self.run = steps, cells, run
        self.operation: Operation | None = None

    def __call__(self) -> Any:
        """Each cell is let go of behind its last use, so that its memory is used again."""
        result, cells, self.cells = None, self.cells, []
        for instruction, reads, made, done in self.steps:
            try:
                result = instruction.execute([cells[n] for n in reads], [cells[n] for n in made], self.run)
            except BaseException:  # the message tells which of them it was
                if self.operation is not None:
                    self.operation.name, self.operation.line = instruction.name, instruction.line
                raise
            for n in done:
                cells[n] = None
        return result


def _in_turn(numbers: Sequence[list[int]], steps: Sequence[Step]) -> list[Chain]:
    made = [Chain(each, steps) for each in numbers]
    last = {n: chain for chain in made for n in chain.used}
    for n, chain in last.items():
        chain.drops.append(n)
    return made


def _node(step: Step) -> Node:
    """A chain has no one in its middle whom others may wait for, or who waits for others, outside of it."""
    instruction = step.instruction
    alone = bool(step.external_writes) or instruction.gives_result
    place = instruction.device, instruction.device.lane_for(instruction.lane)
    return Node(place, step.needs, step.follows, alone or bool(step.external_reads), alone)


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
        self._memories, self._inputs, self._outputs = memories, inputs, outputs
        self._state = {memory.storage for memory in memories if memory.storage is not None}
        self._written = {n for step in steps for n in step.external_writes}
        self._single = _in_turn([[number] for number in range(len(steps))], steps)
        self._chains = _in_turn(chains([_node(step) for step in steps]), steps)
        checks = (n for n, step in enumerate(steps) if step.instruction.kind and step.instruction.kind.check)
        self._checks = list(checks)  # they make nothing that could fail for others
        self._places = list(dict.fromkeys(chain.place for chain in self._single))

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
        for number in self._checks:
            operations[number].wait()
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
            if self._can_read(given, number, layout, device):
                outside[number] = given.memory
                continue
            with placement.on(device):
                outside[number] = array(
                    given if given.stride() == layout[1] else _strided(given, layout)
                ).memory
        cells = [
            Cell(m.layout) if s is None else s.cell for m, s in zip(self._memories, outside, strict=True)
        ]
        return cells, outside

    def _can_read(self, given: Any, number: int, layout: Layout, device: Any) -> bool:
        """Whether an input needs no copy: it is an array in this memory that the program does not write."""
        return (
            isinstance(given, Array)
            and given.memory not in self._state
            and given.memory.program is None
            and given.place.memory == device.memory
            and given.view_of_memory() is None
            and given.stride() == layout[1]
            and number not in self._written
        )

    def _submit(self, inputs: Sequence[Any], order: Sequence[int] | None) -> dict[int, Operation]:
        """Returns the operation that has each step."""
        run, self.n_runs = self.n_runs, self.n_runs + 1
        cells, outside = self._values(inputs)
        runs = self._chains if order is None and not trace.active else self._single
        lanes = {place: placement.engine_of(place[0]).lane(*place) for place in self._places}
        operations: dict[int, Operation] = {}
        behind: list[Operation] = []
        with GRAPH:
            for number in range(len(runs)) if order is None else order:
                chain = runs[number]
                lane = lanes[chain.place]
                engine: Any = lane.device.engine
                operation = chain.operation(engine, lane, cells, run)
                reads: list[Any] = [outside[n] for n in chain.external_reads]
                written: list[Any] = [outside[n] for n in chain.external_writes]
                for storage in written:
                    storage.version += 1
                needs = [operations[n] for n in chain.needs]
                follows = [operations[n] for n in chain.follows] + behind
                engine.submit_next(operation, reads, written, needs, follows)
                for n in chain.numbers:
                    operations[n] = operation
                if order is not None:
                    behind = [operation]
                else:
                    for n in chain.drops:
                        cells[n] = None
        return operations


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
