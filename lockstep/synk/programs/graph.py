"""Functions that are graphs of PyTensor: one compiled function in every rank."""

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.type import TensorType

from lockstep.synk.programs import Input, Program
from lockstep.synk.shareds import Shared

RECURSION = 20_000  # Python frames while PyTensor walks a deep graph: each is small, the stack has room


@dataclass(frozen=True)
class Graph:
    """What the user wrote: variables and expressions, and what goes to pytensor.function as it is."""

    name: str
    inputs: list[Any]
    n_divided: int  # the first so many inputs are divided, the others go whole to all
    outputs: list[Any]
    output_modes: list[str | None]
    returns: str
    updates: list[tuple[Any, Any]]
    update_modes: list[tuple[str | None, bool]]  # and whether the user gave it
    givens: list[tuple[Any, Any]]
    sliceable: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def ends(self) -> list[Any]:
        """All expressions in it, and all variables."""
        return [*self.inputs, *self.outputs, *(v for pair in (*self.updates, *self.givens) for v in pair)]


class GraphShared(Shared):
    """A shared variable of PyTensor."""

    kind = "graph"

    def __init__(self, variable: Any) -> None:
        self.parts = [variable]
        self._storage = variable.container.storage
        self.name = variable.name or f"<{variable.type}>"

    def get(self) -> Any:
        return self._storage[0]

    def put(self, value: Any) -> None:
        self._storage[0] = value

    def become_own(self, rank: int) -> None:
        value = self.get()
        if isinstance(value, np.random.Generator):
            self.put(own_stream(value, rank))


class GraphProgram(Program):
    """A compiled graph. Its shared variables are those of `known`, the caller's or a worker's."""

    kind = "graph"

    def __init__(self, graph: Graph, shareds: Mapping[Any, Shared]) -> None:
        self.graph, self.name, self.returns = graph, graph.name, graph.returns
        self.output_modes = graph.output_modes
        self.inputs = [
            Input(variable.name, str(variable.dtype), variable.ndim, number >= graph.n_divided)
            for number, variable in enumerate(graph.inputs)
        ]
        self._function = compile_graph(graph)
        self._function.trust_input = True  # dtype and ndim have been checked
        self.sliceable = [shareds[variable] for variable in graph.sliceable]
        self.updated, self.default_modes = self._find_updated(shareds)

    def call(self, inputs: list[np.ndarray]) -> list[Any]:
        return [np.asarray(value) for value in self._function(*inputs)]

    def call_alone(self, inputs: list[Any]) -> list[Any]:
        self._function.trust_input = False
        try:
            return [np.asarray(value) for value in self._function(*inputs)]
        finally:
            self._function.trust_input = True

    def pieces(self, number: int, new: list[Shared]) -> Iterator[tuple[str, Any]]:
        graph, what = self.graph, f"function {self.name!r}"
        yield what, receive
        variables = [shared.parts[0] for shared in new]
        defaults = [variable.default_update for variable in variables]
        nodes = list(nodes_in_order([*graph.ends(), *(end for end in defaults if end is not None)]))
        yield what, (number, len(variables), len(nodes), settings())
        for shared, variable in zip(new, variables, strict=True):
            value = None if shared.is_array else shared.get()
            shape = shared.get().shape if shared.is_array else None
            made = (shared.number, type(variable), variable.type, variable.name, shape, value)
            yield f"{what}: shared variable {shared.name!r}", made
        for node in nodes:
            yield f"{what}: operation {node}", node
        yield f"{what}: default updates", defaults
        yield f"{what}: one of its options ({', '.join(graph.options)})", graph.options
        yield what, graph

    def _find_updated(self, shareds: Mapping[Any, Shared]) -> tuple[dict[Shared, str | None], set[Shared]]:
        """Variables whose new values are folded: all that are updated but random streams, which go on."""
        given = {
            variable: mode
            for (variable, _), mode in zip(self.graph.updates, self.graph.update_modes, strict=True)
        }
        updated, default = {}, set()
        for variable in updated_by(self._function):
            mode, is_given = given.get(variable, ("avg", False))
            if isinstance(variable.type, TensorType):
                updated[shareds[variable]] = mode
                if not is_given:
                    default.add(shareds[variable])
        return updated, default


def compile_graph(graph: Graph) -> Any:
    """The compiled function, which returns a list. What pytensor.function raises names the function."""
    with deep_recursion():
        try:
            return pytensor.function(
                graph.inputs,
                graph.outputs,
                updates=graph.updates,
                givens=graph.givens or None,
                name=graph.name,
                **graph.options,
            )
        except Exception as error:
            error.add_note(f"compiling function {graph.name!r}")
            raise


def shareds_of(graph: Graph) -> list[Any]:
    """The shared variables that a graph needs, with those that their default updates need."""
    found: dict[Any, None] = {}
    ends = graph.ends()
    while ends:
        new = [v for v in ancestors(ends) if isinstance(v, SharedVariable) and v not in found]
        found.update(dict.fromkeys(new))
        ends = [v.default_update for v in new if v.default_update is not None]
    return list(found)


def updated_by(function: Any) -> list[Any]:
    """The shared variables that a compiled function updates, by default too."""
    return [given.variable for given in function.maker.inputs if given.implicit and given.update is not None]


def used_by(function: Any) -> list[Any]:
    """The shared variables that a compiled function uses or updates."""
    return list(function.get_shared())


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Room for Python's recursion along a deep graph."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def receive(here: Any, objects: Iterator[Any]) -> None:
    """Makes the program on a worker."""
    with deep_recursion():
        number, n_variables, n_nodes, values = next(objects)
        apply_settings(values)
        new = [_make_shared(here, *next(objects)) for _ in range(n_variables)]
        for _ in range(n_nodes):
            next(objects)
        _set_default_updates(new, next(objects))
        next(objects)  # the options, which the graph has, too
        graph = next(objects)
    shareds = {shared.parts[0]: shared for shared in here.shareds.values()}
    here.programs[number] = GraphProgram(graph, shareds)


def _make_shared(
    here: Any, number: int, kind: Any, type_: Any, name: str | None, shape: tuple[int, ...] | None, value: Any
) -> Shared:
    """An array's value comes by Adopt; until then it is one of that shape and dtype."""
    if shape is not None:
        value = np.empty(shape, type_.dtype)
    shared = GraphShared(kind(type=type_, value=value, strict=False, name=name))
    shared.number = number
    shared.become_own(here.rank)
    here.shareds[number] = shared
    return shared


def _set_default_updates(new: list[Shared], defaults: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTensor's own streams still have them
        for shared, default in zip(new, defaults, strict=True):
            shared.parts[0].default_update = default


def own_stream(generator: np.random.Generator, rank: int) -> np.random.Generator:
    """The random stream of `rank`: a function of the state and the rank. Rank 0 keeps what there is."""
    if rank == 0:
        return generator
    bits = generator.bit_generator
    digest = hashlib.sha256(_canonical(bits.state).encode()).digest()
    seed = np.random.SeedSequence(int.from_bytes(digest, "big"), spawn_key=(rank,))
    return np.random.Generator(type(bits)(seed))


def _canonical(state: Any) -> str:
    if isinstance(state, Mapping):
        return ";".join(f"{key}={_canonical(state[key])}" for key in sorted(state))
    return str(np.asarray(state).tolist())


_SETTINGS = ("floatX", "mode", "linker", "optimizer", "cast_policy", "on_unused_input", "allow_gc")


def settings() -> dict[str, Any]:
    """What of PyTensor's configuration a program may have changed, and what it builds depends on."""
    return {name: getattr(pytensor.config, name) for name in _SETTINGS}


def apply_settings(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if getattr(pytensor.config, name) != value:
            setattr(pytensor.config, name, value)


def nodes_in_order(ends: Sequence[Any]) -> Iterator[Any]:
    """All operations in the expressions, each after its inputs; those inside an operation before it."""
    for node in toposort(ends):
        inner = getattr(node.op, "fgraph", None)
        if inner is not None:
            yield from nodes_in_order(inner.outputs)
        yield node
