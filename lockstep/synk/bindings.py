"""Variables that name a module or an optimizer, in the callables that ranks have copies of.

A program that lets such a variable name another object changes this process's copy of the callable only. The
ranks would compute with the former object, and their weights would differ without an error.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from lockstep.synk import imported, settings


@dataclass(frozen=True)
class Binding:
    """A variable of a callable, and the module or optimizer that it named at distribute().

    Attributes:
        name: The name of the variable.
        read: Returns the value that it has now, or None.
        value: The value that it had.
    """

    name: str
    read: Callable[[], Any]
    value: Any


def find(function: Any) -> list[Binding]:
    """Return the variables of a callable, and of the functions that it names, with a module or optimizer."""
    return [
        Binding(name, read, value)
        for each in _functions(function)
        for name, read, value in _variables(each)
        if issubclass(type(value), settings.kinds())
    ]


def assigned_names(function: Any) -> set[str]:
    """Return the names of the variables that a callable may assign itself, which it does on all ranks."""
    return set().union(*map(imported.assigned_names, _functions(function)))


def check(bindings: list[Binding], assigned: set[str], what: str) -> None:
    """Raise ValueError if a variable names another module or optimizer than it did.

    Args:
        bindings: From `find`.
        assigned: From `assigned_names` of all callables.
        what: The function, for the message.
    """
    for binding in bindings:
        value = binding.read()
        if value is binding.value or binding.name in assigned:
            continue
        if issubclass(type(value), settings.kinds()):
            raise ValueError(
                f"{what}: {binding.name!r} is another {type(value).__name__} than at distribute(), which the "
                "ranks lack. Create this function again, and call distribute()"
            )


def find_result(function: FunctionType) -> str | None:
    """Return the name of a variable that is the result of an operation with gradients, or None.

    A copy of the result does not know from which parameters it was computed.
    """
    if "torch" not in sys.modules:
        return None
    tensor = sys.modules["torch"].Tensor
    results = (name for name, _, value in _variables(function) if isinstance(value, tensor) and value.grad_fn)
    return next(results, None)


def _variables(function: FunctionType) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield the global variables and those of the closure that have a value: name, reader and value."""
    for name, value in imported.find_globals(function):
        short = name.rpartition(".")[2]
        yield short, partial(function.__globals__.get, short), value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = _contents(cell)
        if value is not None:
            yield name, partial(_contents, cell), value


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value, yet or any more
        return None


def _functions(function: Any) -> Iterator[FunctionType]:
    """Yield a callable's function, and those that it names, without those of libraries."""
    first = function.func if isinstance(function, partial) else function
    first = getattr(first, "__func__", first if isinstance(first, FunctionType) else type(first).__call__)
    pending, seen = [first], set[int]()
    while pending:
        each = pending.pop()
        if isinstance(each, FunctionType) and id(each) not in seen:
            seen.add(id(each))
            if each is first or not imported.is_library(each.__module__):
                yield each
                pending += [value for _, _, value in _variables(each)]
