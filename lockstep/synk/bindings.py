"""Detection of variables, attributes and entries that name other objects than when ranks received them.

A program that lets one of them name another object changes this process's copy of the callable only. The
ranks would compute with the former object, and their results would differ without an error.
"""

import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

from lockstep.synk import imported, settings
from lockstep.synk.imported import is_a

Read = Callable[[], Any]

_MOST_ENTRIES = 100  # a longer container has data rather than what a callable chooses by name
_MOST_BINDINGS = 1000  # each call reads all of them
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, complex, str, bytes)
_CALLED = frozenset({"__call__", "forward"})  # methods that a callable executes without naming them


@dataclass(slots=True)
class Binding:
    """A variable, an attribute or an entry of a container.

    Attributes:
        name: For messages, e.g. "self.optimizer".
        read: Returns what it names now, or None if it is gone.
        value: What it names on the other ranks.
        has_warned: Whether the user was warned that the two differ.
    """

    name: str
    read: Read
    value: Any
    has_warned: bool = False


class Bindings:
    """The bindings of the callables that one distribute() has sent, which share what they change."""

    def __init__(self) -> None:
        self._found: dict[Any, Binding] = {}

    def find(self, function: Any) -> list[Binding]:
        """Return what a callable uses: its variables, and the attributes and entries that it reaches."""
        search = _Search(function, _CALLED)
        while not search.attributes >= (more := _attribute_names(search)):
            search = _Search(function, search.attributes | more)  # by which it finds more methods
        return [self._found.setdefault(key, binding) for key, binding in search.found.items()]


def check(found: list[Binding], what: str) -> None:
    """Compare what bindings name now with what the other ranks have. Another value warns once.

    Args:
        found: From `Bindings.find`.
        what: The function, for the message.

    Raises:
        ValueError: One of them names another module, optimizer, function or class than it did.
    """
    for binding in found:
        value = binding.read()
        if value is not binding.value and not _is_same(value, binding.value):
            _tell(binding, value, what)


def accept(found: list[Binding]) -> None:
    """Take over what a callable has changed itself, which it did on all ranks."""
    for binding in found:
        if not binding.has_warned:
            binding.value = binding.read()


def find_result(function: FunctionType) -> str | None:
    """Return the name of a variable that is the result of an operation with gradients, or None.

    A copy of the result does not know from which parameters it was computed.
    """
    if "torch" not in sys.modules:
        return None
    tensor = sys.modules["torch"].Tensor
    variables = [each for _, each in _variables(function) if is_a(each.value, tensor)]
    return next((each.name for each in variables if each.value.grad_fn), None)


def _tell(binding: Binding, value: Any, what: str) -> None:
    kind = type(value)
    changed = f"{what}: {binding.name!r} is another {kind.__name__} than at distribute(), which other ranks"
    again = "create this function again, and call distribute()"
    if is_a(value, *settings.kinds(), FunctionType, MethodType, type, ModuleType):
        raise ValueError(f"{changed} lack: {again}")
    if not binding.has_warned:
        binding.has_warned = True
        warnings.warn(f"{changed} have not seen: pass it as an input, or {again}", stacklevel=5)


def _is_same(value: Any, former: Any) -> bool:
    """Return whether two values are equal, as those of a statement that is executed again."""
    kind = type(value)
    if kind is not type(former):
        return False
    if kind is FunctionType:
        own = value.__closure__, value.__defaults__, value.__kwdefaults__
        return bool(value.__code__ == former.__code__) and own == (None, None, None)
    return kind in _PLAIN and bool(value == former)


class _Search:
    """The objects that a callable reaches by the names of attributes, with its bindings.

    Attributes:
        attributes: The names.
        functions: The functions that it reaches, without those of libraries.
        found: The bindings, by the object that has them and their name there.
    """

    def __init__(self, first: Any, attributes: frozenset[str]) -> None:
        self.attributes = attributes
        self.functions: list[FunctionType] = []
        self.found: dict[Any, Binding] = {}
        seen: dict[int, Any] = {}
        pending = [("self", first)]
        while pending and len(self.found) < _MOST_BINDINGS:
            name, thing = pending.pop()
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing
            pending += _parts(thing)
            for key, binding in chain(_layers(name, thing), self._uses(name, thing)):
                self.found[key] = binding
                pending.append((binding.name, binding.value))

    def _uses(self, name: str, thing: Any) -> Iterator[tuple[Any, Binding]]:
        kind = type(thing)
        if kind in _CONTAINERS:
            yield from _entries(name, thing)
        elif kind is FunctionType and imported.is_users(thing.__module__):
            self.functions.append(thing)
            yield from _variables(thing)
        elif is_a(thing, ModuleType) and imported.is_users(thing.__name__):
            yield from self._named(thing.__name__, thing)
        elif is_a(thing, type) and imported.is_users(thing.__module__):
            for each in filter(lambda base: imported.is_users(base.__module__), thing.__mro__):
                yield from self._named(each.__name__, each)
        elif imported.is_users(kind.__module__) and not settings.is_optimizer(thing):
            yield from self._named(name, thing)

    def _named(self, name: str, thing: Any) -> Iterator[tuple[Any, Binding]]:
        """Yield the attributes in an object's own dictionary that functions name."""
        has = _dictionary(thing)
        sent = {"training"} if _is_module(thing) else set[str]()  # by each call
        for attribute in sorted(self.attributes & has.keys() - sent):
            read = partial(has.get, attribute)
            yield (id(thing), attribute), Binding(f"{name}.{attribute}", read, has[attribute])


def _is_module(thing: Any) -> bool:
    return is_a(thing, *settings.kinds()[:1])


def _attribute_names(search: _Search) -> frozenset[str]:
    return frozenset().union(*map(imported.attribute_names, search.functions))


def _parts(thing: Any) -> list[tuple[str, Any]]:
    """Return what belongs to an object for good, each with a name for what is found in it."""
    kind = type(thing)
    if is_a(thing, MethodType):
        return [("self", thing.__self__), ("self", thing.__func__)]
    if is_a(thing, partial):
        return [("self", thing.func), ("its arguments", thing.args), ("its arguments", thing.keywords)]
    if is_a(thing, staticmethod, classmethod):
        return [("self", thing.__func__)]
    if is_a(thing, property, cached_property):
        return [("self", thing.fget if is_a(thing, property) else thing.func)]
    if kind is FunctionType:
        return [("its defaults", thing.__defaults__), ("its defaults", thing.__kwdefaults__)]
    layers = thing._modules.items() if _is_module(thing) else ()
    return [("self", kind), *layers]


def _variables(function: FunctionType) -> Iterator[tuple[Any, Binding]]:
    """Yield the global variables that exist, and those of the closure."""
    for name, value in imported.find_globals(function):
        short = name.rpartition(".")[2]
        read: Read = partial(function.__globals__.get, short)
        yield (id(function.__globals__), short), Binding(short, read, value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield (id(cell), name), Binding(name, partial(_contents, cell), _contents(cell))


def _layers(name: str, module: Any) -> Iterator[tuple[Any, Binding]]:
    """Yield the layers of a module that have no parameters. The others are in its settings (settings.py)."""
    for key, layer in module._modules.items() if _is_module(module) else ():
        if not settings.has_parameters(layer):
            yield (id(module), key), Binding(f"{name}.{key}", partial(module._modules.get, key), layer)


def _entries(name: str, container: Any) -> Iterator[tuple[Any, Binding]]:
    if len(container) > _MOST_ENTRIES:
        return
    is_dict = isinstance(container, dict)
    for key, value in list(container.items() if is_dict else enumerate(container)):
        if type(key) in (str, int):
            read = partial(dict.get, container, key) if is_dict else partial(_at, container, key)
            yield (id(container), key), Binding(f"{name}[{key!r}]", read, value)


def _at(sequence: Any, index: int) -> Any:
    return sequence[index] if index < len(sequence) else None


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value, yet or any more
        return None


def _dictionary(thing: Any) -> Any:
    """Return an object's own attributes, without executing code of its class."""
    if is_a(thing, type):
        return vars(thing)
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:  # it has slots
        return {}
