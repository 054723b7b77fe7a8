"""Programs: operations that are recorded once, kept as a graph, and run again on new inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lockstep.errors import UserError
from lockstep.flow import graph, placement, private, trace
from lockstep.flow.arrays import Array
from lockstep.flow.creation import array
from lockstep.flow.engine import Engine, engine_of
from lockstep.flow.instructions import Cell, Instruction, Storage, strides_of_copy
from lockstep.flow.lanes import Lane, Operation
from lockstep.flow.recipes import Layout


@dataclass
class ProgramVariable:
    """A value in static single assignment form: every write makes a new version.

    Attributes:
        generated_by: Number of the operation that makes it; None if it exists before the program runs.
        waiting: Numbers of the operations that read it.
    """

    name: str
    device: str
    version: int
    generated_by: int | None
    waiting: list[int] = field(default_factory=list)


@dataclass
class ProgramOperation:
    """An operation, its device, and what it reads and writes: indices into `CapturedProgram.variables`."""

    number: int
    name: str
    device: str
    lane: str
    phase: str
    line: str
    inputs: list[int]
    outputs: list[int] = field(default_factory=list)


@dataclass
class ProgramMemory:
    """A memory that a program uses.

    Attributes:
        storage: The memory, if it exists before the program runs; None if the program makes it.
        newest: Index of its newest variable.
    """

    layout: Layout | None
    storage: Storage | None
    newest: int


@dataclass
class ProgramStep:
    """An operation with everything that running it needs.

    Attributes:
        reads: Numbers of memories.
        made: Numbers of memories.
        needs: Numbers of earlier steps.
        follows: Numbers of earlier steps.
        external_reads: Memories that exist before the run. Other operations may use them as well, so the
            engine computes their hazards in every run.
        external_writes: Memories that it writes and that exist before the run.
    """

    instruction: Instruction
    reads: list[int]
    made: list[int]
    needs: list[int]
    follows: list[int]
    external_reads: list[int]
    external_writes: list[int]


class Node(NamedTuple):
    """An operation as `chains` sees it.

    Attributes:
        lane: Where it runs.
        needs: Numbers of earlier operations.
        follows: Numbers of earlier operations.
        opens: Whether no chain may continue across its start.
        closes: Whether no chain may continue behind it.
    """

    lane: Any
    needs: Sequence[int]
    follows: Sequence[int]
    opens: bool
    closes: bool


def chains(nodes: Sequence[Node]) -> list[list[int]]:
    """Partition the nodes, which are in program order, into lists of numbers.

    The operations of a chain are neighbours on their lane, and each needs the one before. The first waits
    for everything that any of them waits for, and every operation that waits for one of them also waits for
    the last. So a chain neither delays nor hastens any operation, and a failure spreads to the same
    operations.
    """
    before, after = _Reach(nodes), _Reach(nodes, backwards=True)
    made: list[list[int]] = []
    newest: dict[Any, list[int]] = {}  # chain of each lane
    waiting: dict[int, tuple[int, int]] = {}  # operations that wait for a chain, by the chain's first
    for number, node in enumerate(nodes):
        chain = newest.get(node.lane)
        if chain is not None and not node.opens and chain[-1] in node.needs and not nodes[chain[-1]].closes:
            first, last = chain[0], chain[-1]
            own = _bits(chain)
            by_need, by_order = (
                (old | new) & ~(1 << number)
                for old, new in zip(waiting[first], after.direct(last), strict=True)
            )
            needs, follows = (bits & ~own for bits in before.direct(number))
            if not (
                needs & ~before.needs[first] or follows & ~before.all[first]
                or by_need & ~after.needs[number] or by_order & ~after.all[number]
            ):  # fmt: skip
                chain.append(number)
                waiting[first] = by_need, by_order
                continue
        newest[node.lane] = [number]
        made.append(newest[node.lane])
        waiting[number] = 0, 0
    return made


class _Reach:
    """Bit sets of the operations before (or after) each node, by needs and by all edges."""

    def __init__(self, nodes: Sequence[Node], backwards: bool = False) -> None:
        n = len(nodes)
        self._direct = [(_bits(node.needs), _bits(node.follows)) for node in nodes]
        if backwards:
            turned = [[0, 0] for _ in nodes]
            for number, node in enumerate(nodes):
                for kind, others in enumerate((node.needs, node.follows)):
                    for other in others:
                        turned[other][kind] |= 1 << number
            self._direct = [(needs, follows) for needs, follows in turned]
        self.needs, self.all = [0] * n, [0] * n
        for number in reversed(range(n)) if backwards else range(n):
            needs, follows = self._direct[number]
            self.needs[number] = needs
            self.all[number] = needs | follows
            for other in _numbers(needs):
                self.needs[number] |= self.needs[other]
            for other in _numbers(needs | follows):
                self.all[number] |= self.all[other]

    def direct(self, number: int) -> tuple[int, int]:
        """Return the node's own edges, by needs and by follows."""
        return self._direct[number]


def _bits(numbers: Sequence[int]) -> int:
    made = 0
    for number in numbers:
        made |= 1 << number
    return made


def _numbers(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


class Chain:
    """Neighbouring steps that are one operation for the engine (`chains`), mostly a single one."""

    def __init__(self, numbers: list[int], steps: Sequence[ProgramStep]) -> None:
        first, own = steps[numbers[0]], [steps[number] for number in numbers]
        self.numbers, self.place = numbers, (first.instruction.device, first.instruction.lane)
        self.needs, self.follows = first.needs, first.follows
        self.external_reads, self.external_writes = first.external_reads, first.external_writes
        self.drops: list[int] = []  # memories that no later chain uses
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
        """Return the operation of one run."""
        instruction = self._steps[0][0]
        running = _Running(self._steps, [cells[n] for n in self.used], run)
        operation = engine.operation(running, lane, instruction.name)
        operation.line, operation.phase = instruction.line, instruction.phase
        running.operation = operation
        return operation


class _Running:
    """A chain in one run of the program."""

    __slots__ = ("cells", "operation", "run", "steps")

    def __init__(self, steps: Sequence[Any], cells: list[Any], run: int) -> None:
        self.steps, self.cells, self.run = steps, cells, run
        self.operation: Operation | None = None

    def __call__(self) -> Any:
        """Run the steps; each value is released after its last use, so that its memory is used again."""
        result, cells, self.cells = None, self.cells, []
        for instruction, reads, made, done in self.steps:
            try:
                result = instruction.execute([cells[n] for n in reads], [cells[n] for n in made], self.run)
            except BaseException:  # the message names the failing step
                if self.operation is not None:
                    self.operation.name, self.operation.line = instruction.name, instruction.line
                raise
            for n in done:
                cells[n] = None
        return result


def _make_chains(numbers: Sequence[list[int]], steps: Sequence[ProgramStep]) -> list[Chain]:
    """Return the chains; each drops the memories that no later chain uses."""
    made = [Chain(each, steps) for each in numbers]
    last = {n: chain for chain in made for n in chain.used}
    for n, chain in last.items():
        chain.drops.append(n)
    return made


def _node(step: ProgramStep) -> Node:
    """Return a step as `chains` sees it. Only the ends of a chain may wait for other operations."""
    instruction = step.instruction
    single = bool(step.external_writes) or instruction.gives_result
    place = instruction.device, instruction.device.lane_for(instruction.lane)
    return Node(place, step.needs, step.follows, single or bool(step.external_reads), single)


class CapturedProgram:
    """A step that `flow.capture` has recorded. A call runs it on other inputs of the same shapes.

    Arrays that exist before the capture are its state: they keep their memory and are changed in place.

    Attributes:
        operations: Its operations, in the order of the capture.
        variables: The values that they read and write.
        edges: {(before, after)}, pairs of numbers of operations.
    """

    def __init__(
        self,
        graph: tuple[list[ProgramOperation], list[ProgramVariable], set[tuple[int, int]]],
        steps: list[ProgramStep],
        memories: list[ProgramMemory],
        inputs: list[tuple[int, Layout, Any]],
        outputs: tuple[list[Any], Any],
        changed: Sequence[Array],
    ) -> None:
        self.operations, self.variables, self.edges = graph
        self.n_runs = 0
        self._memories, self._inputs, self._outputs = memories, inputs, outputs
        self._changed = list(changed)  # state that it writes
        self._state = {memory.storage for memory in memories if memory.storage is not None}
        self._written = {n for step in steps for n in step.external_writes}
        self._single = _make_chains([[number] for number in range(len(steps))], steps)
        self._chains = _make_chains(chains([_node(step) for step in steps]), steps)
        checks = (n for n, step in enumerate(steps) if step.instruction.kind and step.instruction.kind.check)
        self._checks = list(checks)  # a check has no result, so no other operation reports its failure
        self._places = list(dict.fromkeys(chain.place for chain in self._single))

    def __call__(self, *inputs: torch.Tensor, order: Sequence[int] | None = None) -> Any:
        """Run the program, and return what the function returned, as ordinary tensors.

        It returns when these are computed; updates of the state may still run.

        Args:
            inputs: Tensors of the captured shapes and dtypes.
            order: Numbers of all operations; they run one after another in this order, each on its device.

        Raises:
            UserError: An input has another shape or dtype, or the order breaks an edge.
            OperationError: An output could not be computed.
        """
        return self.run(inputs, order)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        order: Sequence[int] | None = None,
        run: int | None = None,
        counted: Callable[[], None] | None = None,
    ) -> Any:
        """Do what a call does, as the run with this number, on which random numbers depend.

        Args:
            counted: A C function to call in the same step that submits the run.
        """
        self._check_inputs(inputs)
        outer = placement.program_of([given for given in inputs if isinstance(given, Array)])
        if outer is not None:
            outer.refuse("calling a program", "call the function that it was captured from")
        if order is not None:
            self._check_order(order)
        operations = self._submit(inputs, order, run, counted)
        for number in self._checks:
            operations[number].wait()
        leaves, structure = self._outputs
        found = [
            operations[leaf.operation].take() if isinstance(leaf, FetchedOutput) else _constant(leaf)
            for leaf in leaves
        ]
        return private.tree_unflatten(found, structure)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a copy would change a state of its own, which no array shows."""
        raise UserError("a program can't be copied or pickled: capture the step of the copied module anew")

    def to_dot(self) -> str:
        """Return the program for Graphviz.

        Operations are boxes, variables with device and version are ellipses. Dashed edges are waits that no
        value explains.
        """
        lines = ["digraph program {", "  node [shape=ellipse];"]
        for n, variable in enumerate(self.variables):
            label = trace.dot_label(f"{variable.name}\n{variable.device}, version {variable.version}")
            lines.append(f"  v{n} [label={label}];")
        explained = set()
        for o in self.operations:
            label = trace.dot_label(f"{o.number} {o.name}\n{o.lane} of {o.device}")
            look = f'shape=box, style=filled, fontcolor=white, fillcolor="{trace.colour(o.phase)}"'
            lines.append(f"  o{o.number} [label={label}, {look}];")
            lines += [f"  v{n} -> o{o.number};" for n in o.inputs]
            lines += [f"  o{o.number} -> v{n};" for n in o.outputs]
            explained |= {(self.variables[n].generated_by, o.number) for n in o.inputs}
        lines += [f"  o{a} -> o{b} [style=dashed];" for a, b in sorted(self.edges) if (a, b) not in explained]
        return "\n".join([*lines, "}", ""])

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self._inputs):
            raise UserError(f"the program takes {len(self._inputs)} inputs, not {len(inputs)}")
        for number, (given, (_, layout, _)) in enumerate(zip(inputs, self._inputs, strict=True)):
            if not isinstance(given, torch.Tensor):
                raise UserError(f"input {number} of the program is a tensor, not {type(given).__name__}")
            if given.layout is not torch.strided:
                raise UserError(f"input {number} of the program is dense, not of layout {given.layout}")
            if given.size() != layout[0] or given.dtype is not layout[2]:
                raise UserError(
                    f"input {number} of the program was captured as {tuple(layout[0])} {layout[2]} and is "
                    f"{tuple(given.size())} {given.dtype} now: capture the step for this shape, too"
                )

    def _check_order(self, order: Sequence[int]) -> None:
        if not isinstance(order, Sequence) or sorted(order) != list(range(len(self.operations))):
            raise UserError(f"order: give each of the numbers 0 to {len(self.operations) - 1} once")
        place = {number: at for at, number in enumerate(order)}
        for before, after in sorted(self.edges):
            if place[before] > place[after]:
                names = (f"{number} ({self.operations[number].name})" for number in (after, before))
                raise UserError(
                    "order: operation {} can't come before {}, on which it depends".format(*names)
                )

    def _values(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the cell of each memory in this run, and the Storage of those that others may use."""
        outside: list[Storage | None] = [memory.storage for memory in self._memories]
        for given, (number, layout, device) in zip(inputs, self._inputs, strict=True):
            if self._can_read(given, number, layout, device):
                outside[number] = given.memory
                continue
            with placement.CurrentDevice(device):
                fits = layout[1] in (given.stride(), strides_of_copy(given))
                outside[number] = array(given if fits else _strided(given, layout)).memory
        cells = [
            Cell(m.layout) if s is None else s.cell for m, s in zip(self._memories, outside, strict=True)
        ]
        return cells, outside

    def _can_read(self, given: Any, number: int, layout: Layout, device: Any) -> bool:
        """Return whether an input needs no copy: an array in this memory that the program does not write."""
        return (
            isinstance(given, Array)
            and given.memory not in self._state
            and given.memory.program is None
            and given.place.memory == device.memory
            and given.view_of_memory() is None
            and given.stride() == layout[1]
            and number not in self._written
        )

    def _submit(
        self,
        inputs: Sequence[Any],
        order: Sequence[int] | None,
        run: int | None,
        counted: Callable[[], None] | None,
    ) -> dict[int, Operation]:
        """Submit a run, and return the operation of each step."""
        number_of_run, self.n_runs = self.n_runs if run is None else run, self.n_runs + 1
        cells, outside = self._values(inputs)
        runs = self._chains if order is None and not trace.active else self._single
        lanes = {place: engine_of(place[0]).lane(*place) for place in self._places}
        operations: dict[int, Operation] = {}
        behind: list[Operation] = []
        # A lane's engine, not its device's: another thread may have closed the engine since, and an
        # operation on the lane of a closed engine is only cancelled by that engine's `check_open`.
        engines = {id(lane.engine): lane.engine for lane in lanes.values()}
        batch = []
        for number in range(len(runs)) if order is None else order:
            chain = runs[number]
            lane = lanes[chain.place]
            operation = chain.operation(lane.engine, lane, cells, number_of_run)
            reads: list[Any] = [outside[n] for n in chain.external_reads]
            written: list[Any] = [outside[n] for n in chain.external_writes]
            needs = [operations[n] for n in chain.needs]
            follows = [operations[n] for n in chain.follows] + behind
            batch.append(lane.engine.submission(operation, reads, written, needs, follows))
            for n in chain.numbers:
                operations[n] = operation
            if order is not None:
                behind = [operation]
            else:
                for n in chain.drops:
                    cells[n] = None
        self._submit_all(batch, list(engines.values()), counted)
        return operations

    def _submit_all(self, batch: list[Any], engines: list[Any], counted: Callable[[], None] | None) -> None:
        """Submit the whole run at once, so that an interrupt cannot split it."""
        torch.autograd.graph.increment_version(self._changed)  # backward must not use an overwritten value
        for engine in engines if batch else ():
            engine.wait_for_room(batch[0].operation.number)
        graph.submit(batch, counted)
        for engine in engines:
            engine.check_open("the program")


@dataclass(frozen=True)
class FetchedOutput:
    """A stand-in for an output that an operation copies into host memory."""

    operation: int


def _constant(leaf: Any) -> Any:
    """Return an output that is the same in each run; the caller may change its copy of a tensor."""
    return private.plainly(leaf.clone) if isinstance(leaf, torch.Tensor) else leaf


def _strided(given: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a copy with the captured strides, on which the program's views were built."""
    if isinstance(given, Array):
        given = given.tensor()
    with private.without_modes():
        return torch.empty_strided(layout[0], layout[1], dtype=layout[2]).copy_(given)
