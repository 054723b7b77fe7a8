"""The search for state of imported modules, which ranks import instead of receiving it.

cloudpickle pickles a function of an imported module by its name. Each rank imports that module, and gets a
network of its own with other weights.
"""

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

# pytest's rewritten asserts refer to _pytest, which refers to all modules of the tests. A notebook's shell
# refers to all of its variables.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "pytensor", "lockstep", "cloudpickle"}
_LIBRARIES |= {"_pytest", "IPython", "ipykernel"}
_CONTAINERS = ("builtins", "collections", "functools")  # their objects may hold those of a user

_GLOBALS, _IMPORTS = ("LOAD_GLOBAL", "LOAD_NAME"), ("IMPORT_NAME",)
_METHOD = "LOAD_METHOD"
_ATTRIBUTES = ("LOAD_ATTR", _METHOD, "LOAD_SUPER_ATTR", "IMPORT_FROM")


def find_state(thing: Any, is_state: Callable[[Any], bool], by_value: bool) -> str | None:
    """Return the name of imported state that a function or class uses, e.g. 'mylib.net', or None.

    Args:
        thing: A function or class that is pickled.
        is_state: Returns whether ranks must receive an object instead of importing it.
        by_value: Whether `thing` is pickled with its globals. Then only modules among these are imported.
    """
    own = f"{thing.__module__}.{thing.__qualname__}"
    pending = list(_attributes(thing, by_value) if by_value else _uses(own, thing))
    program = vars(sys.modules.get("__main__", sys))  # tools that execute programs hold it, e.g. other shells
    seen = {id(program): program}  # has the objects too, so that no id is used again
    while pending:
        name, used = pending.pop()
        if id(used) in seen:
            continue
        seen[id(used)] = used
        if is_state(used):
            return name
        pending += _uses(name, used)
    return None


def _uses(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an imported object uses, each with the name of the global that leads to it."""
    is_code = is_a(thing, FunctionType, type)
    module = str((thing if is_code else type(thing)).__module__)
    is_container = not is_code and module in _CONTAINERS
    if is_a(thing, ModuleType) or (is_library(module) and not is_container):
        return
    if is_a(thing, FunctionType):
        yield from find_globals(thing)
        yield from _attributes(thing)
        thing = thing.__closure__, thing.__defaults__, thing.__kwdefaults__
    for each in gc.get_referents(thing):
        yield name, each


def find_globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a function and the functions inside it name, e.g. 'mylib.net'."""
    for name in sorted(global_names(function)):
        yield f"{function.__module__}.{name}", function.__globals__[name]


def global_names(function: FunctionType) -> set[str]:
    """Return the names of the global variables that a function, or one inside it, reads, and that exist."""
    names = _names(function.__code__, _GLOBALS) & function.__globals__.keys()
    return names - {"__builtins__"}  # in which an interactive interpreter puts what it displayed


def called_attributes(function: FunctionType) -> set[str]:
    """Return the names of the attributes that a function, or one inside it, only calls as methods."""
    others = tuple(each for each in _ATTRIBUTES if each != _METHOD)
    return _names(function.__code__, (_METHOD,)) - _names(function.__code__, others)


def assigned_globals(function: FunctionType) -> set[str]:
    """Return the names of the global variables that a function, or one inside it, assigns."""
    return _names(function.__code__, ("STORE_GLOBAL", "DELETE_GLOBAL"))


def assigned_attributes(function: FunctionType) -> set[str]:
    """Return the names of the attributes that a function, or one inside it, assigns."""
    return _names(function.__code__, ("STORE_ATTR", "DELETE_ATTR"))


def attribute_names(function: FunctionType) -> set[str]:
    """Return the names of the attributes that a function, or one inside it, reads."""
    return _names(function.__code__, _ATTRIBUTES)


def _attributes(thing: Any, by_value: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of modules that a function names, but not of modules that are pickled with it."""
    if not is_a(thing, FunctionType):
        return
    attributes, imports = attribute_names(thing), import_names(thing)
    pending = [value for _, value in find_globals(thing)]
    pending += gc.get_referents(*(thing.__closure__ or ()))
    seen = [each for each in pending if by_value and is_pickled(each)]
    pending += map(sys.modules.get, imports)  # by statements in the function, which each rank executes
    while pending:
        module = pending.pop()
        if is_a(module, ModuleType) and module not in seen and not is_library(module.__name__):
            seen.append(module)
            found = {name: vars(module)[name] for name in sorted(attributes & vars(module).keys())}
            pending += found.values()  # modules of a package
            yield from ((f"{module.__name__}.{name}", value) for name, value in found.items())


def is_pickled(module: Any) -> bool:
    """Return whether the user has chosen to pickle a module, or its package, by value."""
    chosen = tuple(f"{name}." for name in cloudpickle.list_registry_pickle_by_value())
    return is_a(module, ModuleType) and f"{module.__name__}.".startswith(chosen)


def is_a(thing: Any, *kinds: type) -> bool:
    """Return isinstance(thing, kinds), without executing code of the object: a dead weakref.proxy raises."""
    return issubclass(type(thing), kinds)


def _names(code: CodeType, operations: tuple[str, ...]) -> set[str]:
    """Return the names in these operations of code, and of functions inside it."""
    return {name for operation, name in _operations(code) if operation in operations}


@lru_cache(maxsize=10_000)
def _operations(code: CodeType) -> frozenset[tuple[str, str]]:
    """Return the operations of code, and of functions inside it, that have a name, each with its name."""
    inner = [_operations(each) for each in code.co_consts if isinstance(each, CodeType)]
    named = [each for each in dis.get_instructions(code) if isinstance(each.argval, str)]
    return frozenset((_METHOD if _is_method(each) else each.opname, each.argval) for each in named).union(
        *inner
    )


def _is_method(instruction: dis.Instruction) -> bool:
    loads = "LOAD_ATTR", "LOAD_SUPER_ATTR"
    is_marked = sys.version_info >= (3, 12) and instruction.opname in loads  # the lowest bit says it
    return instruction.opname == _METHOD or (is_marked and bool((instruction.arg or 0) & 1))


def import_names(function: FunctionType) -> set[str]:
    """Return the names of the modules that statements in a function, or in one inside it, import."""
    return _names(function.__code__, _IMPORTS)


def loaded_modules() -> tuple[str, ...]:
    """Return the names of the modules of this process, without those of libraries."""
    return tuple(name for name in list(sys.modules) if not is_library(name))


def is_library(module: str | None) -> bool:
    """Return whether a module is of a library whose state ranks may import.

    Args:
        module: The name, from `__module__`; None for a function that was made in a dictionary without a name.
    """
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


@cache
def is_users(module: str | None) -> bool:
    """Return whether a module is the user's, and not of a library or an installed package."""
    if module == "__main__":  # even if a tool of a package executes the program
        return True
    file = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return not is_library(module) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
