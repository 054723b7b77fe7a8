"""What users may give to lockstep.synk.function for a graph, checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor.type import TensorType

from lockstep.synk.programs import Asked
from lockstep.synk.programs.graph import Graph, GraphProgram, GraphShared, shareds_of, updated_by, used_by
from lockstep.synk.results import check_foldable, normalise_mode
from lockstep.synk.shareds import Known


def build(known: Known, asked: Asked) -> GraphProgram:
    """Checks what the user gave for a graph, and compiles it here."""
    name = asked.name
    divided = _check_inputs(name, "inputs", asked.inputs)
    whole = _check_inputs(name, "bcast_inputs", [] if asked.bcast_inputs is None else asked.bcast_inputs)
    for variable in divided:
        _check_divided(name, variable)
    repeated = [v for i, v in enumerate([*divided, *whole]) if v in [*divided, *whole][:i]]
    if repeated:
        raise ValueError(f"{name}: input {repeated[0]} is given twice")
    pairs, update_modes = _check_updates(name, asked.updates)
    givens = _pairs(name, "givens", asked.givens)
    replaced, sliceable = _check_sliceable(name, givens, asked.sliceable_shareds)
    expressions, modes, returns = _check_outputs(name, asked.outputs)
    graph = Graph(
        name,
        [*divided, *whole],
        len(divided),
        expressions,
        modes,
        returns,
        pairs,
        update_modes,
        replaced,
        sliceable,
        asked.options,
    )
    shareds = {variable: known.add(GraphShared(variable)) for variable in shareds_of(graph)}
    for variable in sliceable:
        if variable not in shareds:
            raise ValueError(f"{name}: sliceable {variable.name!r} is not used by the function")
    program = GraphProgram(graph, shareds)
    _check_stored(program, sliceable)
    return program


def _check_inputs(name: str, what: str, inputs: Any) -> list[Any]:
    if not isinstance(inputs, list):
        raise TypeError(f"{name}: {what} is {type(inputs).__name__}, and has to be a list of variables")
    found = []
    for given in inputs:
        variable = given
        if isinstance(given, pytensor.In):
            if given.mutable or given.update is not None or given.value is not None:
                raise TypeError(
                    f"{name}: input {given.variable} is mutable, or has a value or update of its own"
                )
            variable = given.variable
        if not isinstance(variable, Variable) or not isinstance(variable.type, TensorType):
            raise TypeError(f"{name}: input {variable!r} is no tensor variable")
        found.append(variable)
    return found


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
    for number, given in enumerate(listed):
        what = f"{name}: output {number}"
        if isinstance(given, tuple) and len(given) != 2:
            raise TypeError(f"{what} is a tuple of {len(given)}: give (variable, mode)")
        variable, mode = given if isinstance(given, tuple) else (given, "avg")
        if not isinstance(variable, Variable):
            raise TypeError(f"{what}: {variable!r} is no variable")
        mode = normalise_mode(mode, what)
        if mode is not None:
            _check_mode(what, variable, mode)
        expressions.append(variable)
        modes.append(mode)
    return expressions, modes, "list" if isinstance(outputs, list) else "one"


def _check_mode(what: str, variable: Any, mode: str) -> None:
    if not isinstance(variable.type, TensorType):
        raise TypeError(f"{what} is no tensor, which only mode None can give")
    if mode == "gather" and variable.ndim == 0:
        raise TypeError(f"{what} is a scalar, which has no rows to gather")
    check_foldable(mode, variable.dtype, what)


def _check_updates(name: str, updates: Any) -> tuple[list[tuple[Any, Any]], list[tuple[str | None, bool]]]:
    pairs, modes = [], []
    for number, given in enumerate(_entries(name, "updates", updates)):
        what = f"{name}: update {number}"
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise TypeError(f"{what}: give (variable, value) or (variable, value, mode)")
        if not isinstance(given[0], SharedVariable):
            raise TypeError(f"{what}: {given[0]!r} is no shared variable")
        mode = normalise_mode(given[2], what) if len(given) == 3 else "avg"
        if len(given) == 3 and mode is not None:
            check_foldable(mode, given[0].dtype, f"{what} of {given[0].name!r}")
        pairs.append((given[0], given[1]))
        modes.append((mode, len(given) == 3))
    return pairs, modes


def _entries(name: str, what: str, given: Any) -> list[Any]:
    """A dict, or what can be gone through; None is empty."""
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(f"{name}: {what} is {type(given).__name__}: give a list of pairs, or a dict")
    return list(given.items()) if isinstance(given, Mapping) else list(given or [])


def _pairs(name: str, what: str, given: Any) -> list[tuple[Any, Any]]:
    pairs = _entries(name, what, given)
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise TypeError(f"{name}: {what} are pairs: (variable, its replacement)")
    return [(first, second) for first, second in pairs]


def _check_sliceable(
    name: str, givens: list[tuple[Any, Any]], sliceable: Any
) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Givens and sliceables; a sliceable may be a pair: a variable, and the shared one that stands for it."""
    if sliceable is not None and not isinstance(sliceable, list):
        raise TypeError(f"{name}: sliceable_shareds is {type(sliceable).__name__}, and has to be a list")
    found = []
    for entry in sliceable or []:
        variable = entry
        if isinstance(entry, tuple):
            givens = [*givens, *_pairs(name, "sliceable_shareds", [entry])]
            variable = entry[1]
        if not isinstance(variable, SharedVariable) or not isinstance(variable.type, TensorType):
            raise TypeError(f"{name}: sliceable {variable!r} is no shared array")
        if variable.ndim == 0 or variable.type.shape[0] is not None:
            raise TypeError(f"{name}: sliceable {variable.name!r} has no rows, or a fixed number of them")
        found.append(variable)
    if len(set(found)) != len(found):
        raise ValueError(f"{name}: a sliceable is given twice")
    return givens, found


def _check_stored(program: GraphProgram, sliceable: Sequence[Any]) -> None:
    for variable in sliceable:
        if variable not in used_by(program._function):
            raise ValueError(f"{program.name}: sliceable {variable.name!r} is not used by the function")
        if variable in updated_by(program._function):
            raise ValueError(f"{program.name}: sliceable {variable.name!r} is updated by the function")
