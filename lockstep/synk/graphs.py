"""Functions that are graphs of PyTensor, compiled once on every rank."""

import hashlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.aliasing import alias_root
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.type import TensorType

from lockstep.synk.context import RankContext
from lockstep.synk.programs import FunctionRequest, Input, RankProgram, UpdateMode
from lockstep.synk.results import check_reducible, normalise_mode
from lockstep.synk.shareds import Shared, SharedRegistry

RECURSION = 20_000  # Python frames while PyTensor walks a deep graph; they are small and fit on the stack


@dataclass(frozen=True)
class Graph:
    """The checked arguments of a function: variables and expressions, and options of pytensor.function."""

    name: str
    inputs: list[Any]
    n_divided: int  # number of leading inputs that are divided; every rank receives the others whole
    outputs: list[Any]
    output_modes: list[str | None]
    returns: str
    updates: list[tuple[Any, Any]]
    update_modes: list[UpdateMode]
    givens: list[tuple[Any, Any]]
    sliceable: list[Any]
    settings: dict[str, Any]  # of PyTensor, as in the process that created the function
    options: dict[str, Any] = field(default_factory=dict)
    defaults: list[tuple[Any, Any]] = field(default_factory=list)  # shared variables with default updates

    def ends(self) -> list[Any]:
        """Return all expressions and variables of the graph."""
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

    def check_shape(self, shape: tuple[int, ...]) -> None:
        fixed = self.parts[0].type.shape
        if any(want not in (None, length) for want, length in zip(fixed, shape, strict=True)):
            raise ValueError(f"{self.name!r} has shape {fixed}, not {shape}. Give a value of its shape")

    def use_rank_stream(self, rank: int) -> None:
        value = self.get()
        if isinstance(value, np.random.Generator):
            self.put(own_stream(value, rank))


class GraphProgram(RankProgram):
    """A compiled graph with the shared variables of this process."""

    kind = "graph"

    def __init__(self, graph: Graph, shareds: Mapping[Any, Shared]) -> None:
        self.graph, self.name, self.returns = graph, graph.name, graph.returns
        self.output_modes = graph.output_modes
        self.inputs = [
            Input(
                name=variable.name,
                dtype=str(variable.dtype),
                ndim=variable.ndim,
                whole=number >= graph.n_divided,
                shape=variable.type.shape,
            )
            for number, variable in enumerate(graph.inputs)
        ]
        self._function = compile_graph(graph)
        self._function.trust_input = True  # dtype and shape have been checked
        self._copied_outputs, variables = aliases_of(self._function)
        self._copied = [shareds[variable] for variable in variables]
        self.sliceable = [shareds[variable] for variable in graph.sliceable]
        self.updated, self.default_modes = self._find_updated(shareds)

    def check_dtype(self, what: str, dtype: np.dtype[Any]) -> None:
        """Do nothing: the inputs of a graph have dtypes of their own."""

    def call(self, inputs: list[np.ndarray]) -> list[Any]:
        outputs = self._function(*inputs)
        for shared in self._copied:
            shared.put(shared.get().copy())
        copied = self._copied_outputs
        return [np.array(value) if i in copied else np.asarray(value) for i, value in enumerate(outputs)]

    def call_locally(self, inputs: list[Any]) -> list[Any]:
        self._function.trust_input = False
        try:
            return self.call(inputs)
        finally:
            self._function.trust_input = True

    def pieces(self, number: int, new: list[Shared]) -> Iterator[tuple[str, Any]]:
        graph, what = self.graph, f"function {self.name!r}"
        yield what, receive
        defaults = [default for _, default in graph.defaults if default is not None]
        nodes = list(nodes_in_order([*graph.ends(), *defaults]))
        yield what, (number, len(new), len(nodes), graph.settings)
        for shared in new:
            variable = shared.parts[0]
            value = None if shared.is_array else shared.get()
            shape = shared.get().shape if shared.is_array else None
            description = _GraphVariable(
                number=shared.number,
                kind=type(variable),
                type=variable.type,
                name=variable.name,
                shape=shape,
                value=value,
            )
            yield f"{what}: shared variable {shared.name!r}", description
        for node in nodes:
            yield f"{what}: operation {node}", node
        yield f"{what}: one of its options ({', '.join(graph.options)})", graph.options
        yield what, graph

    def _find_updated(self, shareds: Mapping[Any, Shared]) -> tuple[dict[Shared, str | None], set[Shared]]:
        """Return the updated variables whose values are reduced: all except random streams."""
        pairs = zip(self.graph.updates, self.graph.update_modes, strict=True)
        modes = {variable: mode for (variable, _), mode in pairs}
        updated, default = {}, set()
        for variable in updated_by(self._function):
            if isinstance(variable.type, TensorType):
                update_mode = modes.get(variable, UpdateMode())
                updated[shareds[variable]] = update_mode.mode
                if not update_mode.by_user:
                    default.add(shareds[variable])
        return updated, default


def compile_graph(graph: Graph) -> Any:
    """Return the compiled function; errors of pytensor.function get a note with the function's name."""
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
    """Return the shared variables of a graph, including those of their default updates."""
    variables: dict[Any, None] = {}
    ends = graph.ends()
    while ends:
        new = [v for v in ancestors(ends) if isinstance(v, SharedVariable) and v not in variables]
        variables.update(dict.fromkeys(new))
        ends = [v.default_update for v in new if v.default_update is not None]
    return list(variables)


def updated_by(function: Any) -> list[Any]:
    """Return the shared variables that a compiled function updates, default updates included."""
    return [
        argument.variable
        for argument in function.maker.inputs
        if argument.implicit and argument.update is not None
    ]


def aliases_of(function: Any) -> tuple[set[int], list[Any]]:
    """Return what may be the old value of an updated variable: numbers of outputs, and updated variables.

    PyTensor copies neither. Here the old value lies in its variable's slot, which collectives write.
    """
    graph = function.maker.fgraph
    outputs, variables, inputs = set(), [], set(graph.inputs)
    with deep_recursion():
        roots = [alias_root(output) for output in graph.outputs]
    for number, root in enumerate(roots):
        updated = graph.update_mapping.get(number)  # number of an input
        if root not in inputs or not isinstance(root.type, TensorType):
            continue
        if updated is None:
            outputs.add(number)
        elif root is not graph.inputs[updated]:
            variables.append(function.maker.inputs[updated].variable)
    return outputs, variables


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise Python's recursion limit for a deep graph."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def receive(context: RankContext, objects: Iterator[Any]) -> None:
    """Build the program on a worker."""
    with deep_recursion():
        number, n_variables, n_nodes, values = next(objects)
        apply_settings(values)
        for _ in range(n_variables):
            _make_shared(context, next(objects))
        for _ in range(n_nodes):
            next(objects)
        next(objects)  # the options, which the graph has, too
        graph = next(objects)
    _set_default_updates(graph.defaults)
    shareds = {shared.parts[0]: shared for shared in context.shareds.values()}
    context.programs[number] = GraphProgram(graph, shareds)


@dataclass(frozen=True)
class _GraphVariable:
    """The description from which a worker makes its copy of a shared variable.

    Attributes:
        kind: Class of the variable.
        type: PyTensor's type of its value.
        shape: Shape of the value if it is an array, which UseSlots sets later.
        value: Any other value.
    """

    number: int
    kind: Any
    type: Any
    name: str | None
    shape: tuple[int, ...] | None
    value: Any


def _make_shared(context: RankContext, described: _GraphVariable) -> None:
    value = described.value
    if described.shape is not None:
        value = np.empty(described.shape, described.type.dtype)
    variable = described.kind(type=described.type, value=value, strict=False, name=described.name)
    shared = GraphShared(variable)
    shared.number = described.number
    shared.use_rank_stream(context.rank)
    context.shareds[shared.number] = shared


def _set_default_updates(defaults: list[tuple[Any, Any]]) -> None:
    """Set those of all variables of a graph: an earlier graph had others, with inputs of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTensor's own streams still have them
        for variable, default in defaults:
            variable.default_update = default


def own_stream(generator: np.random.Generator, rank: int) -> np.random.Generator:
    """Return the random stream of `rank`, a function of the state and the rank; rank 0 keeps the stream."""
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


_SETTINGS = (
    "floatX",
    "mode",
    "linker",
    "optimizer",
    "cast_policy",
    "on_unused_input",
    "allow_gc",
    "numba__fastmath",
)


def settings() -> dict[str, Any]:
    """Return the PyTensor settings that a program may have changed and that compilation depends on."""
    return {name: getattr(pytensor.config, name) for name in _SETTINGS}


def apply_settings(values: Mapping[str, Any]) -> None:
    """Set the PyTensor settings that `settings` has returned; equal ones are not touched."""
    for name, value in values.items():
        if getattr(pytensor.config, name) != value:
            setattr(pytensor.config, name, value)


def nodes_in_order(ends: Sequence[Any]) -> Iterator[Any]:
    """Yield all operations of the expressions, each after its inputs and its inner graph."""
    for node in toposort(ends):
        inner = getattr(node.op, "fgraph", None)
        if inner is not None:
            yield from nodes_in_order(inner.outputs)
        yield node


def build(registry: SharedRegistry, request: FunctionRequest) -> GraphProgram:
    """Check the arguments for a graph, and compile it in this process."""
    name = request.name
    divided = _check_inputs(name, "inputs", request.inputs)
    whole = _check_inputs(name, "bcast_inputs", [] if request.bcast_inputs is None else request.bcast_inputs)
    repeated = [v for i, v in enumerate([*divided, *whole]) if v in [*divided, *whole][:i]]
    if repeated:
        raise ValueError(f"{name}: input {repeated[0]} is given twice: bcast_inputs are not among inputs")
    for variable in divided:
        _check_divided(name, variable)
    pairs, update_modes = _check_updates(name, request.updates)
    givens = _pairs(name, "givens", request.givens)
    replaced, sliceable = _check_sliceable(name, givens, request.sliceable_shareds)
    expressions, modes, returns = _check_outputs(name, request.outputs)
    graph = Graph(
        name=name,
        inputs=[*divided, *whole],
        n_divided=len(divided),
        outputs=expressions,
        output_modes=modes,
        returns=returns,
        updates=pairs,
        update_modes=update_modes,
        givens=replaced,
        sliceable=sliceable,
        settings=settings(),
        options=request.options,
    )
    graph.defaults.extend((variable, variable.default_update) for variable in shareds_of(graph))
    shareds = {variable: registry.add(GraphShared(variable)) for variable, _ in graph.defaults}
    for variable in sliceable:
        if variable not in shareds:
            raise ValueError(f"{name}: sliceable {variable.name!r} is not used by the function")
    program = GraphProgram(graph, shareds)
    _check_stored(program, sliceable)
    return program


def _check_inputs(name: str, what: str, inputs: Any) -> list[Any]:
    if not isinstance(inputs, list):
        raise TypeError(f"{name}: {what} is {type(inputs).__name__}, and has to be a list of variables")
    variables = []
    for argument in inputs:
        variable = argument
        if isinstance(argument, pytensor.In):
            variable = argument.variable
            of_its_own = argument.update is not None or argument.value is not None
            if argument.mutable or of_its_own or argument.name != variable.name:
                raise TypeError(
                    f"{name}: input {variable} is mutable, or has a name, value or update of its own"
                )
        if not isinstance(variable, Variable) or not isinstance(variable.type, TensorType):
            raise TypeError(
                f"{name}: input {variable!r} is not a tensor variable of PyTensor. "
                "A callable is the first argument: function(callable, modes)"
            )
        variables.append(variable)
    return variables


def _check_divided(name: str, variable: Any) -> None:
    if variable.ndim == 0:
        raise TypeError(f"{name}: input {variable} is a scalar, which has no rows: put it into bcast_inputs")
    if variable.type.shape[0] is not None:
        raise TypeError(
            f"{name}: input {variable} has a fixed number of rows ({variable.type.shape[0]}): "
            "put it into bcast_inputs"
        )


def _check_outputs(name: str, outputs: Any) -> tuple[list[Any], list[str | None], str]:
    if outputs is None:
        return [], [], "none"
    listed = outputs if isinstance(outputs, list) else [outputs]
    expressions, modes = [], []
    for number, argument in enumerate(listed):
        what = f"{name}: output {number}"
        if isinstance(argument, tuple) and len(argument) != 2:
            raise TypeError(f"{what} is a tuple of {len(argument)}: give (variable, mode)")
        variable, mode = argument if isinstance(argument, tuple) else (argument, "avg")
        if not isinstance(variable, Variable):
            raise TypeError(f"{what}: {variable!r} is not a variable")
        mode = normalise_mode(mode, what)
        if mode is not None:
            _check_mode(what, variable, mode)
        expressions.append(variable)
        modes.append(mode)
    return expressions, modes, "list" if isinstance(outputs, list) else "one"


def _check_mode(what: str, variable: Any, mode: str) -> None:
    if not isinstance(variable.type, TensorType):
        raise TypeError(f"{what} is not a tensor, which only mode None can return")
    if mode == "gather" and variable.ndim == 0:
        raise TypeError(f"{what} is a scalar, which has no rows to gather")
    check_reducible(mode, variable.dtype, what, ": (variable, mode)")


def _check_updates(name: str, updates: Any) -> tuple[list[tuple[Any, Any]], list[UpdateMode]]:
    pairs, modes = [], []
    for number, argument in enumerate(_entries(name, "updates", updates)):
        what = f"{name}: update {number}"
        if not isinstance(argument, tuple) or len(argument) not in (2, 3):
            raise TypeError(f"{what}: give (variable, value) or (variable, value, mode)")
        if not isinstance(argument[0], SharedVariable):
            raise TypeError(f"{what}: {argument[0]!r} is not a shared variable")
        mode = normalise_mode(argument[2], what) if len(argument) == 3 else "avg"
        if len(argument) == 3 and mode is not None:
            check_reducible(mode, argument[0].dtype, f"{what} of {argument[0].name!r}")
        pairs.append((argument[0], _as_variable(what, *argument[:2])))
        modes.append(UpdateMode(mode, by_user=len(argument) == 3))
    return pairs, modes


def _as_variable(what: str, variable: Any, value: Any) -> Any:
    """Return the value that replaces a variable: a variable, or a constant for a number or an array."""
    if isinstance(value, Variable) or not isinstance(variable, Variable):
        return value
    try:
        return variable.type.filter_variable(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: {value!r} can't replace {variable}: {error}") from error


def _entries(name: str, what: str, argument: Any) -> list[Any]:
    """Return the entries of a dict or an iterable as a list; None is empty."""
    if argument is not None and not isinstance(argument, Iterable):
        raise TypeError(f"{name}: {what} is {type(argument).__name__}: give a list of pairs, or a dict")
    return list(argument.items()) if isinstance(argument, Mapping) else list(argument or [])


def _pairs(name: str, what: str, argument: Any) -> list[tuple[Any, Any]]:
    pairs = _entries(name, what, argument)
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise TypeError(f"{name}: {what} are pairs: (variable, its replacement)")
    return [(first, _as_variable(f"{name}: {what}", first, second)) for first, second in pairs]


def _check_sliceable(
    name: str, givens: list[tuple[Any, Any]], sliceable: Any
) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return givens and sliceables; a sliceable pair (variable, shared variable) adds a given."""
    if sliceable is not None and not isinstance(sliceable, list):
        raise TypeError(f"{name}: sliceable_shareds is {type(sliceable).__name__}, and has to be a list")
    variables = []
    for entry in sliceable or []:
        variable = entry
        if isinstance(entry, tuple):
            givens = [*givens, *_pairs(name, "sliceable_shareds", [entry])]
            variable = entry[1]
        if not isinstance(variable, SharedVariable) or not isinstance(variable.type, TensorType):
            raise TypeError(f"{name}: sliceable {variable!r} is not a shared array")
        if variable.ndim == 0 or variable.type.shape[0] is not None:
            raise TypeError(f"{name}: sliceable {variable.name!r} has no rows, or a fixed number of them")
        variables.append(variable)
    if len(set(variables)) != len(variables):
        raise ValueError(f"{name}: a sliceable is given twice")
    return givens, variables


def _check_stored(program: GraphProgram, sliceable: Sequence[Any]) -> None:
    used, updated = program._function.get_shared(), updated_by(program._function)
    for variable in sliceable:
        if variable not in used:
            raise ValueError(f"{program.name}: sliceable {variable.name!r} is not used by the function")
        if variable in updated:
            raise ValueError(f"{program.name}: sliceable {variable.name!r} is updated by the function")
