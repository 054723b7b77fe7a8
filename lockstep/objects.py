"""Python objects of the user: functions by name, and what `lockstep.train` passes to its run.

A program passes a class or function of a network, or datasets.

The caller pickles each object by value (cloudpickle), so the run's processes never import the caller's file.
The pickles lie in memory files of the caller, which only the environment of its run names, and end with the
caller. No file in a run's folder is ever unpickled: a program that resumes a run passes the objects again.
"""

import importlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal

from lockstep.errors import UserError, first_line, nearest

Kind = Literal["model", "data"]  # the keys whose values may name an object
SOURCE = "caller"  # of `model: caller:Net`

_VARIABLE = "LOCKSTEP_OBJECTS"  # environment variable: JSON, the path of each pickle by its kind
_REMEDIES = {
    "model": "lockstep.resume(folder, model=...)",
    "data": "lockstep.resume(folder, train_data=..., val_data=...), or name it: data=package.module:function",
}
_NOTHING: Mapping[Kind, Any] = MappingProxyType({})
_of_this_context: ContextVar[Mapping[Kind, Any]] = ContextVar("objects", default=_NOTHING)


@contextmanager
def pickled(objects: Mapping[Kind, Any]) -> Iterator[dict[str, str]]:
    """Hold pickles of objects in memory files inside the block.

    Yields:
        The environment variable by which the processes of a run find them.

    Raises:
        UserError: An object can't be pickled; the message names it.
    """
    paths = {}
    with ExitStack() as stack:
        for kind, value in objects.items():
            content = _pickle(kind, value)
            file = stack.enter_context(open(os.memfd_create("an object of lockstep.train"), "wb"))
            file.write(content)
            file.flush()
            paths[kind] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield {_VARIABLE: json.dumps(paths)}


def _pickle(kind: Kind, value: Any) -> bytes:
    import cloudpickle  # here: only the caller needs it

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # the user's objects raise what they like
        raise UserError(
            f"{kind}: {_name_of(value)} can't be pickled for the run's processes: {type(error).__name__}: "
            f"{first_line(error)}. Open files and connections when they are first used, not before."
        ) from error


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", "") or f"an object of {type(value).__qualname__}"


@contextmanager
def available(objects: Mapping[Kind, Any]) -> Iterator[None]:
    """Have `load_object` return these objects in this thread, inside the block."""
    token = _of_this_context.set(objects)
    try:
        yield
    finally:
        _of_this_context.reset(token)


def check_available(kind: Kind, name: str) -> None:
    """Raise UserError unless the caller has passed an object of this kind."""
    if kind in _of_this_context.get() or kind in _paths():
        return
    raise UserError(
        f"{kind}: {name} was passed by a Python program and is not stored. Pass it again: {_REMEDIES[kind]}."
    )


def load_object(kind: Kind, name: str) -> Any:
    """Return the object that the caller has passed.

    Args:
        name: The object's name, for messages.

    Raises:
        UserError: The caller has passed no such object, or it can't be unpickled in this process.
    """
    check_available(kind, name)
    if kind in _of_this_context.get():
        return _of_this_context.get()[kind]
    try:
        with open(_paths()[kind], "rb") as file:
            return pickle.load(file)
    except Exception as error:  # the caller has died, or a module of the user's fails when it is imported
        raise UserError(
            f"{kind}: {name} can't be unpickled in a process of the run: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _paths() -> dict[Kind, str]:
    return dict(json.loads(os.environ.get(_VARIABLE, "{}")))


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Return the function <package.module>:<function>.

    Args:
        key: The key of the configuration that names it, for messages.

    Raises:
        UserError: The module can't be imported, or has no such function.
    """
    module_name, _, function_name = name.rpartition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's code
        text = f"{type(error).__name__}: {error}"
        raise UserError(f"{key}: {module_name} can't be imported: {text}") from error
    if not hasattr(module, function_name):
        close = nearest(function_name, dir(module))
        raise UserError(f"{key}: {module_name} has no function {function_name}{close}")
    function = getattr(module, function_name)
    if not callable(function):
        raise UserError(f"{key}: {function_name} of {module_name} is no function")
    return function  # type: ignore[no-any-return]
